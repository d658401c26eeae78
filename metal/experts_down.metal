#include "experts.h"

// Routed experts, second launch: out[n] = sum_k w2[ids[n, k]] h[n, k], k
// upwards.
//
// Grid (D / R threadgroups of K simdgroups): a threadgroup owns R channels of
// every row. Its simdgroups share out the slots n * K + k; the first slot with
// an expert computes for all rows of the block that chose it, at most M at a
// time (see `together`). Each slot keeps its own sum, and a row adds those of
// its own K: the order depends on F and its K alone. All float.
template <int D, int F, int K, int R, int M, typename W, typename I>
METAL_FUNC void experts_down(
    W w,                      // w2 [E, D, F]
    const device float* h,    // [N, K, F]
    I ids,                    // [N, K]
    device float* out,        // [N, D]
    threadgroup float* sums,  // [N * K, R]
    uint rows,
    uint d,  // the first of the R channels
    uint thread_index,
    uint simdgroup,
    uint lane) {
  for (uint slot = simdgroup; slot < rows * K; slot += K) {
    ulong left = together(ids, rows * K, slot, lane);
    if (left & ((ulong(1) << slot) - 1)) {
      continue;
    }
    constexpr int octets = F / 8;
    int first = (uint(ids[slot]) * D + d) * octets;
    uint from = slot;
    while (left) {
      uint slots[M];
      uint live = next<M>(left, from, slots);
      float products[R][M] = {};
      for (int o = lane; o < octets; o += 32) {
        // All weights first, so that their loads are under way together.
        float4 weights[2 * R];
        float factors[R];
        for (int r = 0; r < R; r++) {
          factors[r] = octet(
              w, first + r * octets, o, weights[2 * r], weights[2 * r + 1]);
        }
        for (uint m = 0; m < M; m++) {
          if (m == 0 || m < live) {
            const device float4* row =
                (const device float4*)(h + slots[m] * F) + 2 * o;
            float4 a = row[0];
            float4 b = row[1];
            for (int r = 0; r < R; r++) {
              products[r][m] =
                  plus(products[r][m], weights + 2 * r, factors[r], a, b);
            }
          }
        }
      }
      for (uint m = 0; m < M; m++) {
        if (m == 0 || m < live) {
          for (uint r = 0; r < R; r++) {
            float sum = simd_sum(products[r][m]);
            if (lane == 0) {
              sums[slots[m] * R + r] = sum;
            }
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < rows * R; i += 32 * K) {
    uint row = i / R;
    uint r = i % R;
    float sum = sums[row * K * R + r];
    for (uint k = 1; k < K; k++) {
      sum += sums[(row * K + k) * R + r];
    }
    out[row * D + d + r] = sum;
  }
}
