// Prefill's routed experts, between products of groups of rows of one expert:
// a slot of a group holds the place source[slot] = n * K + k of token n, or is
// empty, and is then neither read nor written.
//
//   gated: out[slot] = silu(min(gate, limit)) clip(up, limit) weights[n, k]
//   sum:   out[n] = sum_k y[slots[n, k]]
//
// Grid (elements of `out` / 8, rounded up to the threadgroup): a thread owns
// eight neighbours of a row. All float, rounded once to the type of `out`; the
// sum runs over k upwards.
#include "octets.h"
#include "swiglu.h"

constant constexpr uint EMPTY = 0xffffffff;

template <uint F, typename O, typename W>
METAL_FUNC void experts_grouped_gated(
    const device O* gate,       // [slots, F]
    const device O* up,         // [slots, F]
    const device uint* source,  // [slots]
    W weights,                  // [N, K]
    float limit,
    device O* out,  // [slots, F]
    uint slots,
    uint at) {
  uint slot = at / (F / 8);
  if (slot >= slots || source[slot] == EMPTY) {
    return;
  }
  float weight = weights[source[slot]];
  float g[8], u[8];
  load(gate + 8 * at, g);
  load(up + 8 * at, u);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u[j] = swiglu(g[j], u[j], limit) * weight;
  }
  store(out + 8 * at, u);
}

template <uint D, uint K, typename Y, typename S>
METAL_FUNC void experts_grouped_sum(
    const device Y* y,  // [all slots, D]
    S slots,            // [N, K]
    device float* out,  // [N, D]
    uint N,
    uint at) {
  uint n = at / (D / 8);
  if (n >= N) {
    return;
  }
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (uint k = 0; k < K; k++) {
    float v[8];
    load(y + slots[n * K + k] * D + 8 * (at % (D / 8)), v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      sum[j] += v[j];
    }
  }
  store(out + 8 * at, sum);
}
