// The product of rows with a weight matrix, out[n] = W x[n], in G groups of its
// rows: group g meets x[n, g] alone (G = 1: a plain product). Several matrices
// may share a launch, and a threadgroup serves one of them, or two of which the
// first product gates the second (swiglu.h).
//
// Grid (the threadgroups of all matrices, G): a threadgroup is 8 simdgroups, of
// which 2^SPLIT own a tile, as products.h says with the order of the sums.
// linear_back writes out back into the streams (streams.h).
#include "dequantize.h"
#include "products.h"
#include "rows.h"
#include "streams.h"

// Floats of a threadgroup's `part`.
template <int ROWS, int TILE, int SETS>
constexpr METAL_FUNC int linear_part() {
  return 8 * 32 * ((ROWS * TILE * SETS + 31) / 32);
}

template <
    int ROWS,
    int TILE,
    int SETS,
    int SPLIT,
    int K,
    int FROM,
    int STRIDE,
    typename W>
METAL_FUNC void linear(
    const device float* x,    // [N, FROM], of which G * K columns
    W w,                      // [G * R, K]
    device float* out,        // [N, STRIDE], of which G * R columns
    threadgroup float* part,  // [linear_part]
    uint N,
    uint R,
    uint group,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  uint at = threadgroup_index * 8 + simdgroup;
  x += group * K;
  w = rows(w, group * R * K);
  products<ROWS, TILE, SETS, SPLIT, K, FROM>(
      x, w, part, N, R, at, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out += group * R;
  totals<ROWS, TILE, SETS, SPLIT, 0>(
      part, out, 0, N, R, STRIDE, 0, at, simdgroup, lane);
}

// Half of the simdgroups multiply with each, so that 2^SPLIT is at most 4.
template <
    int ROWS,
    int TILE,
    int SETS,
    int SPLIT,
    int K,
    int FROM,
    int STRIDE,
    typename W>
METAL_FUNC void linear_gated(
    const device float* x,    // [N, FROM], of which K columns
    W gate,                   // [R, K]
    W up,                     // [R, K]
    device float* out,        // [N, STRIDE], of which R columns
    threadgroup float* part,  // [linear_part]
    uint N,
    uint R,
    float limit,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  constexpr int GATED = linear_part<ROWS, TILE, SETS>() / 2;
  uint at = threadgroup_index * 4 + simdgroup % 4;
  W w = simdgroup < 4 ? gate : up;
  products<ROWS, TILE, SETS, SPLIT, K, FROM>(
      x, w, part, N, R, at, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  totals<ROWS, TILE, SETS, SPLIT, GATED>(
      part, out, limit, N, R, STRIDE, 0, at, simdgroup, lane);
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
    threadgroup float* part,   // [linear_part]
    threadgroup float* y,      // [ROWS, SETS * TILE]
    threadgroup float* chunk,  // [ROWS, HC, SETS * TILE]
    uint N,
    uint D,
    uint threadgroup_index,
    uint simdgroup,
    uint lane) {
  constexpr int T = SETS * TILE;
  uint first = threadgroup_index * T;
  uint at = threadgroup_index * 8 + simdgroup;
  stream_tile<HC, C, T, ROWS, 8, F> tile;
  // One row leaves registers for loads that are under way with the weights.
  if (ROWS == 1) {
    begin_streams(tile, from, post, comb, fn, N, D, first, simdgroup, lane);
  }
  products<ROWS, TILE, SETS, 3, K, K>(x, w, part, N, D, at, simdgroup, lane);
  if (ROWS > 1) {
    begin_streams(tile, from, post, comb, fn, N, D, first, simdgroup, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  totals<ROWS, TILE, SETS, 3, 0>(
      part, y, 0, N, D, T, first, at, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_streams(tile, y, chunk, streams, mixed, N, D, first, simdgroup, lane);
}
