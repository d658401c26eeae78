// The product of rows with a weight matrix, out[n] = W x[n], in G groups of its
// rows: group g meets x[n, g] alone (G = 1: a plain product). Several matrices
// may share a launch, and a threadgroup serves one of them.
//
// Grid (the threadgroups of all matrices, G): a threadgroup is 8 simdgroups, of
// which 2^split own a tile and take its blocks of columns in turn. The lanes of
// a simdgroup are SETS, each with TILE outputs of all rows; a weight is read
// once and multiplied with ROWS rows. All float, weights as dequantize.h makes
// them, rounded once. Sums run over a lane's columns upwards, then over the
// lanes of a set (sums.h), then over simdgroups upwards, whatever ROWS and TILE
// are. linear_back writes out back into the streams (streams.h).
#include "dequantize.h"
#include "rows.h"
#include "streams.h"
#include "sums.h"

// How many simdgroups share a tile, as a power of 2: enough to fill a GPU, but
// with columns enough each. They order a row's sum, so that they may depend on
// the shape of W, never on N.
METAL_FUNC uint linear_split(uint outputs, uint K) {
  uint columns = outputs >= 16384 ? 2048 : outputs >= 4096 ? 1024 : 1;
  return K < 2 * columns ? 0 : K < 4 * columns ? 1 : K < 8 * columns ? 2 : 3;
}

// Adds the products of U blocks of columns, `step` apart from k on, all inside.
template <int U, int QUADS, int ROWS, int TILE, int K, int STRIDE, typename W>
METAL_FUNC void linear_add(
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
      at += n + 2 < ROWS || n + 2 == N ? STRIDE / 4 : 0;
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

// The sums of each simdgroup; a barrier must follow. K and G are constants, so
// that the rows of a tile are constant distances apart. A lane reads SETS quads
// of columns at a time, or if that is 1 as many as the type must. TILE is at
// most R.
template <int ROWS, int TILE, int SETS, int K, int G, typename W>
METAL_FUNC void linear_products(
    const device float* x,    // [N, G, K], N of ROWS - 1 or ROWS
    W w,                      // [G * R, K]
    threadgroup float* part,  // [simdgroups, BATCHES, 32]
    uint split,
    uint N,
    uint R,
    uint group,
    uint threadgroup_index,
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
  uint s = simdgroup & ((1 << split) - 1);
  uint tile = (threadgroup_index * 8 + simdgroup) >> split;
  uint m = (tile * SETS + lane % SETS) * TILE;
  // The last outputs begin earlier, not to end past R.
  uint first = min(m, R - TILE);
  w = rows(w, (group * R + first) * K);
  x += group * K;
  float sums[LANES * BATCHES] = {};
  uint step = 4 * QUADS * LANES << split;
  uint k = 4 * QUADS * (LANES * s + lane / SETS);
#pragma unroll 1
  for (; k + (U - 1) * step < K; k += U * step) {
    linear_add<U, QUADS, ROWS, TILE, K, G * K>(x, w, N, k, step, sums);
  }
  if (U > 1 && k < K) {
    linear_add<1, QUADS, ROWS, TILE, K, G * K>(x, w, N, k, step, sums);
  }

  part += 32 * BATCHES * simdgroup;
#pragma unroll
  for (int b = 0; b < BATCHES - 1; b++) {
    part[32 * b + lane] = lane_sums<LANES, SETS>(sums + LANES * b, lane);
  }
  int last = BATCHES - 1;
  part[32 * last + lane] = lane_sums<REST, SETS>(sums + LANES * last, lane);
}

// Adds those of the simdgroups of a tile; out[n * stride] is output `from`.
template <int ROWS, int TILE, int SETS, typename O>
METAL_FUNC void linear_totals(
    const threadgroup float* part,
    O out,
    uint split,
    uint N,
    uint R,
    uint stride,
    uint from,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  constexpr int LANES = 32 / SETS;
  constexpr int VALUES = ROWS * TILE;
  constexpr int BATCHES = (VALUES + LANES - 1) / LANES;
  uint tile = (threadgroup_index * 8 + simdgroup) >> split;
  uint m = (tile * SETS + lane % SETS) * TILE;
  uint first = min(m, R - TILE);
  bool adds = (simdgroup & ((1 << split) - 1)) == 0;
  part += 32 * BATCHES * simdgroup;
#pragma unroll
  for (int b = 0; b < BATCHES; b++) {
    uint i = LANES * b + lane / SETS;
    uint n = i / TILE;
    uint o = first + i % TILE;
    if (adds && i < VALUES && n < N && o >= m) {
      float total = part[32 * b + lane];
      for (uint p = 1; p < 1u << split; p++) {
        total += part[32 * (BATCHES * p + b) + lane];
      }
      out[n * stride + o - from] = total;
    }
  }
}

template <int ROWS, int TILE, int SETS, int K, int G, int STRIDE, typename W>
METAL_FUNC void linear(
    const device float* x,    // [N, G, K], N of ROWS - 1 or ROWS
    W w,                      // [G * R, K]
    device float* out,        // [N, STRIDE], of which G * R columns
    threadgroup float* part,  // [simdgroups, BATCHES, 32]
    uint N,
    uint R,
    uint group,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  uint split = linear_split(R * G, K);
  linear_products<ROWS, TILE, SETS, K, G>(
      x, w, part, split, N, R, group, threadgroup_index, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  linear_totals<ROWS, TILE, SETS>(
      part,
      out + group * R,
      split,
      N,
      R,
      STRIDE,
      0,
      threadgroup_index,
      simdgroup,
      lane);
}

// For G = 1 and where all simdgroups share a tile.
template <
    int ROWS,
    int TILE,
    int SETS,
    int K,
    int HC,
    int C,
    typename W,
    typename P,
    typename Q,
    typename F>
METAL_FUNC void linear_back(
    const device float* x,     // [N, K], N of ROWS - 1 or ROWS
    W w,                       // [D, K]
    const device float* from,  // [N, HC, D]
    P post,                    // [N, HC]
    Q comb,                    // [N, HC, HC]
    const device F* fn,        // [M, HC * D]
    device float* streams,     // [N, HC, D]
    device float* mixed,       // [N, ceil(D / C), M + 1]
    threadgroup float* part,   // [simdgroups, BATCHES, 32]
    threadgroup float* y,      // [ROWS, SETS * TILE]
    threadgroup float* chunk,  // [ROWS, HC, SETS * TILE]
    uint N,
    uint D,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  constexpr int T = SETS * TILE;
  uint first = threadgroup_index * T;
  stream_tile<HC, C, T, ROWS, 8, F> tile;
  // One row leaves registers for loads that are under way with the weights.
  if (ROWS == 1) {
    begin_streams(tile, from, post, comb, fn, N, D, first, simdgroup, lane);
  }
  linear_products<ROWS, TILE, SETS, K, 1>(
      x, w, part, 3, N, D, 0, threadgroup_index, simdgroup, lane);
  if (ROWS > 1) {
    begin_streams(tile, from, post, comb, fn, N, D, first, simdgroup, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  linear_totals<ROWS, TILE, SETS>(
      part, y, 3, N, D, T, first, threadgroup_index, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_streams(tile, y, chunk, streams, mixed, N, D, first, simdgroup, lane);
}
