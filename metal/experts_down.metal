#include "experts.h"

// Experts, second launch: out[n] = sum_k w2[ids[n, k]] h[n, k], k upwards, and
// last the shared expert's.
//
// Grid (D / T threadgroups of PLACES simdgroups, or a multiple): a threadgroup
// owns T channels of every row. A simdgroup has a place k and blocks of 1024
// columns, 32 a lane; the first slot n * K + k with an expert computes for all
// rows of the block that chose it (see `together`). Each slot keeps its own
// sums. Sums run over a lane's columns upwards, then over lanes (sums.h), then
// over blocks upwards: the order depends on F and K alone. All float.

// For M of the slots.
template <int F, int T, int R, int M, typename W>
METAL_FUNC void experts_down_sums(
    W w,
    const device float* h,    // [slots, F]
    threadgroup float* sums,  // [slots, blocks, T]
    uint first,               // of the T rows of weights
    const thread uint* slots,
    uint block,
    uint lane) {
  uint column = 1024 * block + 32 * lane;
  bool inside = column < F;
  column = inside ? column : 0;
  columns kept[M];
  for (int m = 0; m < M; m++) {
    kept[m] = keep(h + slots[m] * F + column, inside);
  }
  uint slot = slots[0];
  for (int m = 1; m < M; m++) {
    slot = lane % M == m ? slots[m] : slot;
  }
  uint i = first * F + column;
  sums += (slot * blocks(F) + block) * T;
  sweep<T / (2 * R), R, M>(w, w, i, i + R * F, 2 * R * F, F, kept, sums, lane);
}

// For the slots of one expert, whose K places are those of PLACES from FIRST
// on.
template <int F, int K, int FIRST, int PLACES, int T, int R, int M, typename W>
METAL_FUNC void experts_down_slots(
    W w,
    const device float* h,
    threadgroup float* sums,
    uint first,
    ulong left,  // the slots n * K + k
    uint slot,   // the first of them
    uint block,
    uint lane) {
  while (left) {
    uint slots[M];
    uint live = next<M>(left, slot, slots);
    for (int m = 0; m < M; m++) {
      slots[m] = slots[m] / K * PLACES + FIRST + slots[m] % K;
    }
    // As many products at a time either way.
    if (live == 1) {
      experts_down_sums<F, T, R, 1>(w, h, sums, first, slots, block, lane);
    } else {
      experts_down_sums<F, T, R / M, M>(w, h, sums, first, slots, block, lane);
    }
  }
}

template <
    int D,
    int F,
    int K,
    int PLACES,
    int T,
    int R,
    int M,
    typename W,
    typename S,
    typename I>
METAL_FUNC void experts_down(
    W w,                      // w2 [E, D, F]
    S shared,                 // the shared expert's w2 [D, F], or w
    const device float* h,    // [N, PLACES, F]
    I ids,                    // [N, K]
    device float* out,        // [N, D]
    threadgroup float* sums,  // [N, PLACES, blocks, T]
    uint rows,
    uint tile,
    uint thread_index,
    uint2 simdgroup,  // how many, and which
    uint lane) {
  constexpr int BLOCKS = blocks(F);
  uint place = simdgroup.y % PLACES;
  uint d = tile * T;
  for (uint block = simdgroup.y / PLACES; block < BLOCKS;
       block += simdgroup.x / PLACES) {
    for (uint slot = place; place < K && slot < rows * K; slot += K) {
      ulong left = together(ids, rows * K, slot, lane);
      if (!(left & ((ulong(1) << slot) - 1))) {
        uint first = ids[slot] * D + d;
        experts_down_slots<F, K, 0, PLACES, T, R, M>(
            w, h, sums, first, left, slot, block, lane);
      }
    }
    if (place == K) {
      ulong left = (ulong(1) << rows) - 1;
      experts_down_slots<F, 1, K, PLACES, T, R, M>(
          shared, h, sums, d, left, 0, block, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < rows * T; i += 32 * simdgroup.x) {
    uint row = i / T;
    float total = 0;
    for (uint k = 0; k < PLACES; k++) {
      uint from = ((row * PLACES + k) * BLOCKS) * T + i % T;
      float sum = sums[from];
      for (uint b = 1; b < BLOCKS; b++) {
        sum += sums[from + b * T];
      }
      total = k ? total + sum : sum;
    }
    out[row * D + d + i % T] = total;
  }
}
