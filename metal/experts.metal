#include "experts.h"

// Experts, first launch: for each row n and each expert that it meets,
// h[n, k] = silu(min(w1 x[n], limit)) * clamp(w3 x[n], limit) * weight.
//
// Grid (F / T threadgroups of ceil(D / 1024) simdgroups, slots): a threadgroup
// owns T rows of w1 and w3 of the expert of one slot, for all rows of the block
// that meet it, at most M = 2 at a time. Slots n * K + k are routed (see
// `together`); the shared expert has one more for all rows, and place K of h. A
// lane owns 32 columns. Sums run over a lane's columns upwards, then over lanes
// (sums.h), then over simdgroups upwards: the order depends on D alone. All
// float.

// For M of the rows.
template <int D, int T, int R, int M, typename W>
METAL_FUNC void experts_sums(
    W gate,
    W up,
    const device float* x,
    threadgroup float* part,  // [simdgroups, M, T / R, 2, R]
    uint first,               // of the T rows of weights
    const thread uint* rows,
    uint simdgroup,
    uint lane) {
  uint column = 1024 * simdgroup + 32 * lane;
  bool inside = column < D;
  column = inside ? column : 0;
  columns kept[M];
  for (int m = 0; m < M; m++) {
    kept[m] = keep(x + rows[m] * D + column, inside);
  }
  uint i = first * D + column;
  part += 2 * T * (simdgroup * M + lane % M);
  sweep<T / R, R, M>(gate, up, i, i, R * D, D, kept, part, lane);
}

// K places of a row are asked for, from place FIRST of PLACES on.
template <
    int D,
    int F,
    int K,
    int FIRST,
    int PLACES,
    int T,
    int R,
    int M,
    typename W,
    typename P>
METAL_FUNC void experts(
    W gate,                 // w1 [E, F, D]
    W up,                   // w3 [E, F, D]
    const device float* x,  // [N, D]
    P weights,              // [N, K], or 1 from place 1 on
    float limit,
    device float* h,          // [N, PLACES, F]
    threadgroup float* part,  // [simdgroups, 2 * T * M]
    uint expert,
    ulong left,  // the slots n * K + k that meet it
    uint slot,   // the first of them
    uint tile,
    uint thread_index,
    uint2 simdgroup,  // how many, and which
    uint lane) {
  uint first = expert * F + tile * T;
  while (left) {
    uint slots[M];
    uint rows[M];
    uint live = next<M>(left, slot, slots);
    for (int m = 0; m < M; m++) {
      rows[m] = slots[m] / K;
    }
    if (live == 1) {
      experts_sums<D, T, R, 1>(
          gate, up, x, part, first, rows, simdgroup.y, lane);
    } else {
      experts_sums<D, T, R, M>(
          gate, up, x, part, first, rows, simdgroup.y, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = thread_index; j < T * live; j += 32 * simdgroup.x) {
      uint t = j / live;
      uint m = j % live;
      uint at = 2 * T * m + t / R * 2 * R + t % R;
      float g = part[at];
      float u = part[at + R];
      for (uint s = 1; s < simdgroup.x; s++) {
        at += 2 * T * live;
        g += part[at];
        u += part[at + R];
      }
      // Comparisons, where min and clamp would hide a NaN.
      g = limit < g ? limit : g;
      u = limit < u ? limit : u < -limit ? -limit : u;
      float weight = FIRST ? 1 : weights[slots[m]];
      uint to = rows[m] * PLACES + FIRST + slots[m] % K;
      h[to * F + tile * T + t] = g / (1 + exp(-g)) * u * weight;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
