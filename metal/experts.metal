#include "experts.h"

// Routed experts, first launch: for each row n and each expert e that it chose,
// h[n, k] = silu(min(w1[e] x[n], limit)) * clamp(w3[e] x[n], limit) *
// weights[n, k].
//
// Grid (F / (R * simdgroups) threadgroups, N * K): a simdgroup owns R rows of
// w1 and w3 of the expert of one slot n * K + k, for all rows of the block that
// chose it, at most M at a time (see `together`). A lane sums its octets
// upwards, then the simdgroup its lanes: the order depends on D alone. All
// float.
template <int D, int F, int K, int R, int M, typename W, typename I, typename P>
METAL_FUNC void experts(
    W gate,                 // w1 [E, F, D]
    W up,                   // w3 [E, F, D]
    const device float* x,  // [N, D]
    I ids,                  // [N, K]
    P weights,              // [N, K]
    float limit,
    device float* h,  // [N, K, F]
    uint rows,
    uint slot,
    uint f,  // the first of the R rows of weights
    uint lane) {
  ulong left = together(ids, rows * K, slot, lane);
  if (left & ((ulong(1) << slot) - 1)) {
    return;
  }
  constexpr int octets = D / 8;
  int first = (uint(ids[slot]) * F + f) * octets;
  while (left) {
    uint slots[M];
    uint live = next<M>(left, slot, slots);
    float gates[R][M] = {};
    float ups[R][M] = {};
    for (int o = lane; o < octets; o += 32) {
      // All weights first, so that their loads are under way together.
      float4 w1[2 * R], w3[2 * R];
      float factors1[R], factors3[R];
      for (int r = 0; r < R; r++) {
        int row = first + r * octets;
        factors1[r] = octet(gate, row, o, w1[2 * r], w1[2 * r + 1]);
        factors3[r] = octet(up, row, o, w3[2 * r], w3[2 * r + 1]);
      }
      for (uint m = 0; m < M; m++) {
        if (m == 0 || m < live) {
          const device float4* row =
              (const device float4*)(x + slots[m] / K * D) + 2 * o;
          float4 a = row[0];
          float4 b = row[1];
          for (int r = 0; r < R; r++) {
            gates[r][m] = plus(gates[r][m], w1 + 2 * r, factors1[r], a, b);
            ups[r][m] = plus(ups[r][m], w3 + 2 * r, factors3[r], a, b);
          }
        }
      }
    }
    for (uint m = 0; m < M; m++) {
      if (m == 0 || m < live) {
        uint to = slots[m];
        for (uint r = 0; r < R; r++) {
          float g = simd_sum(gates[r][m]);
          float u = simd_sum(ups[r][m]);
          if (lane == 0) {
            // Comparisons, where min and clamp would hide a NaN.
            g = limit < g ? limit : g;
            u = limit < u ? limit : u < -limit ? -limit : u;
            h[to * F + f + r] = g / (1 + exp(-g)) * u * weights[to];
          }
        }
      }
    }
  }
}
