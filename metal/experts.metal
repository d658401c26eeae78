#include "experts.h"
#include "products.h"
#include "route.metal"

// Experts, first launch: for each row n and each expert in a place k of it,
// h[n, k] = silu(min(w1 x[n], limit)) * clamp(w3 x[n], limit) * weight.
//
// Grid (F / T threadgroups of ceil(D / 1024) simdgroups, K * N and more): a
// threadgroup owns T rows of w1 and w3 of one expert, for one row. A lane owns
// 32 columns. Sums run over a lane's columns upwards, then over lanes 16, 8, 4,
// 2 and 1 apart, then over simdgroups upwards: the order depends on D alone.
// All float. Where logits are given each threadgroup weighs the experts of its
// row, and chooses them if they are not listed, as in route.metal: for one or
// two rows that takes less than another launch. Threadgroups past K * N
// multiply w2 of the shared expert with all rows, as products.h says: what its
// w1 and w3 give is known before.
template <int D, int F, int T, typename W>
METAL_FUNC void experts(
    W gate,                 // w1 [E, F, D]
    W up,                   // w3 [E, F, D]
    const device float* x,  // [D]
    float weight,
    float limit,
    device float* h,            // [F]
    threadgroup float4* stage,  // [simdgroups, 128]
    threadgroup float* part,    // [simdgroups, 2 * T]
    uint expert,
    uint tile,
    uint thread_index,
    uint simdgroup,
    uint lane) {
  constexpr int R = held<W>(T / 2);
  uint i = (expert * F + tile * T) * D;
  stage += 128 * simdgroup;
  threadgroup float* to = part + 2 * T * simdgroup;
  sweep<T / R, R, D, D>(gate, up, i, i, x, simdgroup, stage, to, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint t = thread_index; t < T; t += 32 * blocks(D)) {
    uint at = t / R * 2 * R + t % R;
    float g = part[at];
    float u = part[at + R];
    for (int s = 1; s < blocks(D); s++) {
      g += part[2 * T * s + at];
      u += part[2 * T * s + at + R];
    }
    h[tile * T + t] = swiglu(g, u, limit) * weight;
  }
}

template <int ROWS, int TILE, int SETS, int SPLIT, int K, int FROM, typename W>
METAL_FUNC void experts_shared(
    const device float* x,    // [N, FROM], of which K columns
    W w2,                     // [D, K]
    device float* out,        // [N, D]
    threadgroup float* part,  // [simdgroups, BATCHES, 32]
    uint N,
    uint D,
    uint at,
    uint simdgroup,
    uint lane) {
  products<ROWS, TILE, SETS, SPLIT, K, FROM>(
      x, w2, part, N, D, at, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  totals<ROWS, TILE, SETS, SPLIT, 0>(
      part, out, 0, N, D, D, 0, at, simdgroup, lane);
}
