// The product of rows with a weight matrix, out[n] = W x[n], in G groups of its
// rows: group g meets x[n, g] alone (G = 1: a plain product). Several matrices
// may share a launch, and a threadgroup serves one of them.
//
// Grid (the tiles of all matrices / (8 / split) threadgroups, G): a threadgroup
// is 8 simdgroups. `split` of them own a tile, TILE outputs of all rows, and
// take its blocks of 128 QUADS columns in turn; a weight is read once and
// multiplied with ROWS rows. All float, weights as dequantize.h makes them,
// rounded once. Sums run over a lane's columns upwards, then over lanes
// (sums.h), then over simdgroups upwards, whatever ROWS and TILE are.
#include "dequantize.h"
#include "sums.h"

// How many simdgroups share a tile: as many as fill a GPU. They order a row's
// sum, so that they may depend on the outputs R of a group, never on N.
METAL_FUNC uint linear_split(uint R) {
  return R >= 16384 ? 2 : R >= 4096 ? 4 : 8;
}

METAL_FUNC uint linear_threadgroups(uint R, uint TILE) {
  uint tiles = 8 / linear_split(R);
  return (R + TILE * tiles - 1) / (TILE * tiles);
}

// Adds the products of U blocks of columns, `step` apart from k on, all inside.
template <int U, int ROWS, int TILE, typename W>
METAL_FUNC void linear_add(
    const device float* x,
    W w,
    uint N,
    uint R,
    uint K,
    uint2 group,
    uint m,
    uint k,
    uint step,
    thread float* sums) {
  constexpr int QUADS = W::QUADS;
  uint raw[U][TILE][4 * QUADS];
  float2 scale[U][TILE];
  // All weights first, so that their loads are under way together.
#pragma unroll
  for (int u = 0; u < U; u++) {
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      // Past the end the last row stands in.
      uint i = (group.y * R + min(m + t, R - 1)) * K + k + u * step;
      fetch<QUADS>(w, i, raw[u][t]);
      scale[u][t] = scaling(w, i);
    }
  }
#pragma unroll
  for (int j = 0; j < U * QUADS; j++) {
    int u = j / QUADS;
    int q = j % QUADS;
    float v[TILE][4];
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      float codes[8];
      octet(w, raw[u][t], q / 2, codes);
      float2 s = scale[u][t];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float code = codes[q % 2 * 4 + c];
        v[t][c] = W::MINIMA ? fma(code, s.x, -s.y) : code * s.x;
      }
    }
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      uint at = (min(uint(n), N - 1) * group.x + group.y) * K + k + u * step;
      float4 four = ((const device float4*)(x + at))[q];
#pragma unroll
      for (int t = 0; t < TILE; t++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          float before = sums[n * TILE + t];
          sums[n * TILE + t] = fma(v[t][c], four[c], before);
        }
      }
    }
  }
}

template <int ROWS, int TILE, typename W>
METAL_FUNC void linear(
    const device float* x,    // [N, G, K], N of ROWS - 1 or ROWS
    W w,                      // [G * R, K]
    device float* out,        // [N, G * R]
    threadgroup float* part,  // [simdgroups, ROWS * TILE in whole simdgroups]
    uint N,
    uint R,
    uint K,
    uint2 group,  // G: how many, and which
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  constexpr int QUADS = W::QUADS;
  constexpr int VALUES = ROWS * TILE;
  constexpr int REST = VALUES % 32 > 16 ? 32 : VALUES % 32 > 8 ? 16 : 8;
  constexpr int BATCHES = (VALUES + 31) / 32;
  uint split = linear_split(R);
  uint s = simdgroup % split;
  uint tile = threadgroup_index * (8 / split) + simdgroup / split;
  float sums[32 * BATCHES] = {};
  // How much is loaded before anything is multiplied.
  constexpr int U = ROWS > 2 || W::WORDS > 2 ? 2 : 1;
  uint m = tile * TILE;
  uint step = 128 * QUADS * split;
  uint k = 4 * QUADS * (32 * s + lane);
#pragma unroll(U > 1 ? 1 : 2)
  for (; k + (U - 1) * step < K; k += U * step) {
    linear_add<U, ROWS, TILE>(x, w, N, R, K, group, m, k, step, sums);
  }
  if (U > 1 && k < K) {
    linear_add<1, ROWS, TILE>(x, w, N, R, K, group, m, k, step, sums);
  }

  part += 32 * BATCHES * simdgroup;
#pragma unroll
  for (int b = 0; b < VALUES / 32; b++) {
    part[32 * b + lane] = lane_sums<32>(sums + 32 * b, lane);
  }
  if (VALUES % 32) {
    int b = VALUES / 32;
    part[32 * b + lane] = lane_sums<REST>(sums + 32 * b, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; s == 0 && i < VALUES; i += 32) {
    uint n = i / TILE;
    uint m = tile * TILE + i % TILE;
    if (n < N && m < R) {
      float total = part[i];
      for (uint p = 1; p < split; p++) {
        total += part[32 * BATCHES * p + i];
      }
      out[n * group.x * R + group.y * R + m] = total;
    }
  }
}
