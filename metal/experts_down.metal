#include "experts.h"
#include "streams.h"

// Experts, second launch: out[n] = sum_k w2[ids[n, k]] h[n, k], k upwards, and
// last the shared expert's.
//
// Grid (D / T threadgroups of PLACES * SPLIT simdgroups, N): a threadgroup owns
// T channels of a row. A simdgroup has a place k and every SPLIT-th block of
// 1024 columns, 32 a lane. Sums run over a lane's columns upwards, then over
// lanes 16, 8, 4, 2 and 1 apart, then over blocks upwards: the order depends on
// F and K alone. All float. experts_down_back writes out back into the streams
// (streams.h).
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
METAL_FUNC void experts_down_sums(
    W w,                        // w2 [E, D, F]
    S shared,                   // the shared expert's w2 [D, F], or w
    const device float* h,      // [PLACES, F], of a row
    I ids,                      // [K]
    threadgroup float4* stage,  // [simdgroups, 128]
    threadgroup float* sums,    // [PLACES, blocks, T]
    uint tile,
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
}

// Adds the places' sums of each channel, behind a barrier.
template <int F, int PLACES, int T, typename O>
METAL_FUNC void experts_down_totals(
    const threadgroup float* sums,
    O out,  // [T]
    uint thread_index,
    uint threads) {
  constexpr int BLOCKS = blocks(F);
  for (uint t = thread_index; t < T; t += threads) {
    float total = 0;
    for (int k = 0; k < PLACES; k++) {
      float sum = sums[k * BLOCKS * T + t];
      for (int b = 1; b < BLOCKS; b++) {
        sum += sums[(k * BLOCKS + b) * T + t];
      }
      total = k ? total + sum : sum;
    }
    out[t] = total;
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
    W w,
    S shared,
    const device float* h,
    I ids,
    device float* out,  // [D]
    threadgroup float4* stage,
    threadgroup float* sums,
    uint tile,
    uint simdgroup,
    uint lane) {
  experts_down_sums<D, F, K, PLACES, SPLIT, T>(
      w, shared, h, ids, stage, sums, tile, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  experts_down_totals<F, PLACES, T>(
      sums, out + tile * T, 32 * simdgroup + lane, 32 * PLACES * SPLIT);
}

template <
    int D,
    int F,
    int K,
    int PLACES,
    int SPLIT,
    int T,
    int HC,
    int C,
    typename W,
    typename S,
    typename I,
    typename P,
    typename Q,
    typename N>
METAL_FUNC void experts_down_back(
    W w,
    S shared,
    const device float* h,
    I ids,
    const device float* x,  // [HC, D], of a row
    P post,                 // [HC]
    Q comb,                 // [HC, HC]
    const device N* fn,     // [M, HC * D]
    device float* streams,  // [HC, D]
    device float* part,     // [ceil(D / C), M + 1]
    threadgroup float4* stage,
    threadgroup float* sums,
    uint tile,
    uint simdgroup,
    uint lane) {
  stream_tile<HC, C, T, 1, PLACES * SPLIT, N> ahead;
  experts_down_sums<D, F, K, PLACES, SPLIT, T>(
      w, shared, h, ids, stage, sums, tile, simdgroup, lane);
  begin_streams(ahead, x, post, comb, fn, 1, D, tile * T, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Its sums done, a threadgroup has that memory free.
  threadgroup float* y = (threadgroup float*)stage;  // [T]
  threadgroup float* chunk = y + T;                  // [HC, T]
  experts_down_totals<F, PLACES, T>(
      sums, y, 32 * simdgroup + lane, 32 * PLACES * SPLIT);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_streams(
      ahead, y, chunk, streams, part, 1, D, tile * T, simdgroup, lane);
}
