// Products of a few rows with a matrix: 2^SPLIT simdgroups of a threadgroup own
// a tile of outputs and take its blocks of columns in turn. The lanes of a
// simdgroup are SETS, each with TILE outputs of all rows; a weight is read once
// and multiplied with ROWS rows. All float, weights as dequantize.h makes them,
// rounded once. Sums run over a lane's columns upwards, then over the lanes of
// a set (sums.h), then over simdgroups upwards, whatever ROWS and TILE are.
// SPLIT and SETS order a row's sum, so that they may depend on the matrix,
// never on N.
#include "sums.h"
#include "swiglu.h"

// Adds the products of U blocks of columns, `step` apart from k on, all inside.
template <int U, int QUADS, int ROWS, int TILE, int K, int FROM, typename W>
METAL_FUNC void add_products(
    const device float* x, W w, uint N, uint k, uint step, thread float* sums) {
  constexpr int SPAN = 2 * W::GROUP;  // quads of a scale
  uint raw[U][TILE][4 * QUADS];
  float2 scale[U][TILE][(QUADS + SPAN - 1) / SPAN];
  // All weights first, so that their loads are under way together.
#pragma unroll
  for (int u = 0; u < U; u++) {
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      W row = rows(w, t * K);
      fetch<QUADS>(row, k + u * step, raw[u][t]);
#pragma unroll
      for (int q = 0; q < QUADS; q += SPAN) {
        scale[u][t][q / SPAN] = scaling(row, k + u * step + 4 * q);
      }
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
      float2 s = scale[u][t][q / SPAN];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float code = codes[q % 2 * 4 + c];
        v[t][c] = W::MINIMA ? fma(code, s.x, -s.y) : code * s.x;
      }
    }
    const device float4* at = (const device float4*)(x + k + u * step);
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      float4 four = at[q];
      // Past the end the last row stands in.
      at += n + 2 < ROWS || n + 2 == N ? FROM / 4 : 0;
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

// The sums of each simdgroup; a barrier must follow. K and FROM are
// constants, so that the rows of a tile are constant distances apart. A lane
// reads SETS quads of columns at a time, or if that is 1 as many as the type
// must. TILE is at most R. `at` is the simdgroup's number through all
// threadgroups.
template <
    int ROWS,
    int TILE,
    int SETS,
    int SPLIT,
    int K,
    int FROM,
    typename W>
METAL_FUNC void products(
    const device float* x,    // [N, FROM], of which K; N of ROWS - 1 or ROWS
    W w,                      // [R, K]
    threadgroup float* part,  // [simdgroups, BATCHES, 32]
    uint N,
    uint R,
    uint at,
    uint simdgroup,
    uint lane) {
  constexpr int QUADS = SETS > 1 ? SETS : W::QUADS;
  constexpr int LANES = 32 / SETS;
  constexpr int VALUES = ROWS * TILE;
  constexpr int BATCHES = (VALUES + LANES - 1) / LANES;
  constexpr int LAST = VALUES - LANES * (BATCHES - 1);
  constexpr int REST = LAST > 16  ? 32
                       : LAST > 8 ? 16
                       : LAST > 4 ? 8
                       : LAST > 2 ? 4
                                  : 2;
  // How many blocks are loaded before anything is multiplied.
  constexpr int U = QUADS > 2 ? 1 : 2;
  uint s = at % (1 << SPLIT);
  uint m = ((at >> SPLIT) * SETS + lane % SETS) * TILE;
  // The last outputs begin earlier, not to end past R.
  w = rows(w, min(m, R - TILE) * K);
  float sums[LANES * BATCHES] = {};
  uint step = 4 * QUADS * LANES << SPLIT;
  uint k = 4 * QUADS * (LANES * s + lane / SETS);
#pragma unroll 1
  for (; k + (U - 1) * step < K; k += U * step) {
    add_products<U, QUADS, ROWS, TILE, K, FROM>(x, w, N, k, step, sums);
  }
  if (U > 1 && k < K) {
    add_products<1, QUADS, ROWS, TILE, K, FROM>(x, w, N, k, step, sums);
  }

  part += 32 * BATCHES * simdgroup;
#pragma unroll
  for (int b = 0; b < BATCHES - 1; b++) {
    part[32 * b + lane] = lane_sums<LANES, SETS>(sums + LANES * b, lane);
  }
  int last = BATCHES - 1;
  part[32 * last + lane] = lane_sums<REST, SETS>(sums + LANES * last, lane);
}

// Of a value's simdgroups.
template <int BATCHES, int SPLIT>
METAL_FUNC float total(const threadgroup float* part) {
  float sum = part[0];
  for (uint p = 1; p < 1u << SPLIT; p++) {
    sum += part[32 * BATCHES * p];
  }
  return sum;
}

// Adds those of the simdgroups of a tile; out[n * stride] is output `from`. Of
// two products, the second by simdgroups from 4 on, GATED floats behind the
// first's, the first gates the second.
template <int ROWS, int TILE, int SETS, int SPLIT, int GATED, typename O>
METAL_FUNC void totals(
    const threadgroup float* part,
    O out,
    float limit,
    uint N,
    uint R,
    uint stride,
    uint from,
    uint at,
    uint simdgroup,
    uint lane) {
  constexpr int LANES = 32 / SETS;
  constexpr int VALUES = ROWS * TILE;
  constexpr int BATCHES = (VALUES + LANES - 1) / LANES;
  uint m = ((at >> SPLIT) * SETS + lane % SETS) * TILE;
  uint first = min(m, R - TILE);
  bool adds = at % (1 << SPLIT) == 0 && (!GATED || simdgroup < 4);
  part += 32 * BATCHES * simdgroup + lane;
#pragma unroll
  for (int b = 0; b < BATCHES; b++) {
    uint i = LANES * b + lane / SETS;
    uint n = i / TILE;
    uint o = first + i % TILE;
    if (adds && i < VALUES && n < N && o >= m) {
      float value = total<BATCHES, SPLIT>(part + 32 * b);
      if (GATED) {
        float up = total<BATCHES, SPLIT>(part + 32 * b + GATED);
        value = swiglu(value, up, limit);
      }
      out[n * stride + o - from] = value;
    }
  }
}
