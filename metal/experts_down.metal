#include "experts.h"

// Experts, second launch: out[n] = sum_k w2[ids[n, k]] h[n, k], k upwards, and
// last the shared expert's.
//
// Grid (D / T threadgroups of PLACES * SPLIT simdgroups, N): a threadgroup owns
// T channels of a row. A simdgroup has a place k and every SPLIT-th block of
// 1024 columns, 32 a lane. Sums run over a lane's columns upwards, then over
// lanes 16, 8, 4, 2 and 1 apart, then over blocks upwards: the order depends on
// F and K alone. All float.
template <int F, int T, int SPLIT, typename W>
METAL_FUNC void experts_down_place(
    W w,
    const device float* h,      // [F]
    threadgroup float4* stage,  // [128]
    threadgroup float* sums,    // [blocks, T]
    uint first,                 // of the T rows of weights
    uint block,
    uint lane) {
  constexpr int R = held<W>(T < 32 ? 2 : T / 8);
  uint i = first * F;
#pragma unroll 1
  for (int turn = 0; turn < blocks(F) / SPLIT; turn++) {
    sweep<T / (2 * R), R, F, 2 * F>(
        w, w, i, i + R * F, h, block, stage, sums + T * block, lane);
    block += SPLIT;
  }
}

template <
    int D,
    int F,
    int K,
    int PLACES,
    int SPLIT,
    int T,
    typename W,
    typename S,
    typename I>
METAL_FUNC void experts_down(
    W w,                        // w2 [E, D, F]
    S shared,                   // the shared expert's w2 [D, F], or w
    const device float* h,      // [PLACES, F], of a row
    I ids,                      // [K]
    device float* out,          // [D]
    threadgroup float4* stage,  // [simdgroups, 128]
    threadgroup float* sums,    // [PLACES, blocks, T]
    uint tile,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  constexpr int BLOCKS = blocks(F);
  uint place = simdgroup % PLACES;
  uint block = simdgroup / PLACES;
  h += place * F;
  stage += 128 * simdgroup;
  threadgroup float* to = sums + place * BLOCKS * T;
  if (place < K) {
    uint first = ids[place] * D + tile * T;
    experts_down_place<F, T, SPLIT>(w, h, stage, to, first, block, lane);
  } else {
    experts_down_place<F, T, SPLIT>(
        shared, h, stage, to, tile * T, block, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint t = thread_index; t < T; t += 32 * PLACES * SPLIT) {
    float total = 0;
    for (int k = 0; k < PLACES; k++) {
      float sum = sums[k * BLOCKS * T + t];
      for (int b = 1; b < BLOCKS; b++) {
        sum += sums[(k * BLOCKS + b) * T + t];
      }
      total = k ? total + sum : sum;
    }
    out[tile * T + t] = total;
  }
}
