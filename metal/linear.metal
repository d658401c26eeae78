// The product of rows with a weight matrix, out[n] = W x[n], in G groups of its
// rows: group g meets x[n, g] alone (G = 1: a plain product).
//
// Grid (threadgroup * ceil(R / TILE), G): a threadgroup owns TILE outputs of
// all rows. Its simdgroups take the blocks of 128 QUADS channels in turn; a
// weight is read once and multiplied with ROWS rows. All float, weights as
// dequantize.h makes them. Sums run over a lane's channels upwards, then over
// lanes 16, 8, 4, 2 and 1 apart, then over simdgroups upwards, whatever ROWS
// and TILE are.
#include "dequantize.h"

// Lane l receives the sum of v[l % WIDTH] over the simdgroup.
template <int WIDTH>
METAL_FUNC float linear_sums(thread float* v, uint lane) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
#pragma unroll
    for (int i = 0; i < min(apart, WIDTH); i++) {
      if (apart >= WIDTH) {
        v[i] += simd_shuffle_xor(v[i], apart);
      } else {
        // Each of two lanes goes on with the half of the values that it keeps.
        bool upper = lane & apart;
        float given = upper ? v[i] : v[i + apart];
        v[i] = (upper ? v[i + apart] : v[i]) + simd_shuffle_xor(given, apart);
      }
    }
  }
  return v[0];
}

template <int ROWS, int TILE, typename W>
METAL_FUNC void linear(
    const device float* x,    // [N, G, K], N of ROWS - 1 or ROWS
    W w,                      // [G * R, K]
    device float* out,        // [N, G * R]
    threadgroup float* part,  // [simdgroups, 32]
    uint N,
    uint R,
    uint K,
    uint2 group,  // G: how many, and which
    uint tile,
    uint2 simdgroup,  // how many, and which
    uint lane) {
  constexpr int QUADS = W::QUADS;
  constexpr int VALUES = ROWS * TILE;
  constexpr int WIDTH = VALUES > 16 ? 32 : VALUES > 8 ? 16 : VALUES;
  static_assert(VALUES <= 32, "a lane holds one sum");
  float sum[32] = {};
  uint sg = simdgroup.y;
  // Twice the loads in flight, which a single row needs.
#pragma unroll 2
  for (uint k = 4 * QUADS * (32 * sg + lane); k < K;
       k += 128 * QUADS * simdgroup.x) {
    float4 weight[TILE][QUADS];
    for (int t = 0; t < TILE; t++) {
      // Past the end the last row stands in.
      uint m = group.y * R + min(tile * TILE + t, R - 1);
      read(w, m * K + k, weight[t]);
    }
    for (int n = 0; n < ROWS; n++) {
      uint row = min(uint(n), N - 1) * group.x + group.y;
      const device float4* from = (const device float4*)(x + row * K + k);
      for (int j = 0; j < QUADS; j++) {
        float4 channels = from[j];
        for (int t = 0; t < TILE; t++) {
          for (int c = 0; c < 4; c++) {
            float before = sum[n * TILE + t];
            sum[n * TILE + t] = fma(weight[t][j][c], channels[c], before);
          }
        }
      }
    }
  }

  part[32 * sg + lane] = linear_sums<WIDTH>(sum, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint n = lane / TILE;
  uint m = tile * TILE + lane % TILE;
  if (sg == 0 && lane < VALUES && n < N && m < R) {
    float total = part[lane];
    for (uint s = 1; s < simdgroup.x; s++) {
      total += part[32 * s + lane];
    }
    out[n * group.x * R + group.y * R + m] = total;
  }
}
