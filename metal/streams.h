// Hyper-connections where a sublayer's output comes to be: a threadgroup that
// has T channels of y for ROWS tokens writes them back into the streams, and
// gives the next mixture its part of what hc_mix.metal needs of them,
//   x'[k] = post[k] * y + sum_j comb[j, k] * x[j],
//   part[c] = (fn x', sum of x'^2) over the channels of group c, of all
//   streams.
//
// A group has C channels, and T is a multiple of C; what is past D counts as
// zeros. All float, and each step an explicit fma, which no compiler may
// contract in another way. x' adds j upwards, then post * y. A sum runs over a
// lane's elements upwards, then over lanes 16, 8, 4, 2 and 1 apart: C and HC
// alone decide.
#include "folds.h"

// One element of x', of its channel in all streams.
template <int HC>
METAL_FUNC float written_back(
    const thread float* x, const thread float* comb, float post, float y) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < HC; j++) {
    sum = fma(comb[j], x[j], sum);
  }
  return fma(post, y, sum);
}

// What a thread loads for it before y is there: for elements of x' [ROWS, HC,
// T], of which every THREADS-th is its own, and of the rows of fn of its
// simdgroup.
template <int HC, int C, int T, int ROWS, int SIMDGROUPS, typename F>
struct stream_tile {
  enum {
    M = (2 + HC) * HC,
    THREADS = 32 * SIMDGROUPS,
    ELEMENTS = ROWS * HC * T,
    OWN = (ELEMENTS + THREADS - 1) / THREADS,
    EACH = (M + SIMDGROUPS) / SIMDGROUPS,  // of M products and the squares
    LOADS = (HC * C + 31) / 32,            // a lane's elements of a group
  };
  float x[OWN][HC];
  float comb[OWN][HC];
  float post[OWN];
  F weight[T / C][LOADS][EACH];
};

template <
    int HC,
    int C,
    int T,
    int ROWS,
    int SIMDGROUPS,
    typename F,
    typename P,
    typename Q>
METAL_FUNC void begin_streams(
    thread stream_tile<HC, C, T, ROWS, SIMDGROUPS, F>& tile,
    const device float* x,  // [N, HC, D], N of ROWS - 1 or ROWS
    P post,                 // [N, HC]
    Q comb,                 // [N, HC, HC]
    const device F* fn,     // [M, HC * D]
    uint N,
    uint D,
    uint first,  // channel of the T
    uint sg,
    uint lane) {
  typedef stream_tile<HC, C, T, ROWS, SIMDGROUPS, F> tiles;
#pragma unroll
  for (int o = 0; o < tiles::OWN; o++) {
    uint e = tiles::THREADS * o + 32 * sg + lane;
    if (e < tiles::ELEMENTS) {
      // Past the ends the last row and channel stand in.
      uint n = min(e / (HC * T), N - 1);
      uint k = e / T % HC;
      uint d = min(first + e % T, D - 1);
#pragma unroll
      for (int j = 0; j < HC; j++) {
        tile.x[o][j] = x[(n * HC + j) * D + d];
        tile.comb[o][j] = comb[(n * HC + j) * HC + k];
      }
      tile.post[o] = post[n * HC + k];
    }
  }
#pragma unroll
  for (int c = 0; c < T / C; c++) {
#pragma unroll
    for (int i = 0; i < tiles::LOADS; i++) {
      uint element = min(32 * i + lane, HC * C - 1u);
      uint d = min(first + C * c + element % C, D - 1);
#pragma unroll
      for (int e = 0; e < tiles::EACH; e++) {
        uint m = min(sg + SIMDGROUPS * e, tiles::M - 1u);
        tile.weight[c][i][e] = fn[(m * HC + element / C) * D + d];
      }
    }
  }
}

// To be called behind the barrier that ends y; holds another.
template <int HC, int C, int T, int ROWS, int SIMDGROUPS, typename F>
METAL_FUNC void finish_streams(
    const thread stream_tile<HC, C, T, ROWS, SIMDGROUPS, F>& tile,
    const threadgroup float* y,  // [ROWS, T]
    threadgroup float* chunk,    // [ROWS, HC, T]
    device float* streams,       // [N, HC, D]
    device float* part,          // [N, ceil(D / C), M + 1]
    uint N,
    uint D,
    uint first,
    uint sg,
    uint lane) {
  typedef stream_tile<HC, C, T, ROWS, SIMDGROUPS, F> tiles;
  constexpr int M = tiles::M;
  constexpr int EACH = tiles::EACH;
  constexpr int VALUES = ROWS * EACH;
  constexpr int WIDTH = VALUES > 16  ? 32
                        : VALUES > 8 ? 16
                        : VALUES > 4 ? 8
                        : VALUES > 2 ? 4
                                     : 2;
#pragma unroll
  for (int o = 0; o < tiles::OWN; o++) {
    uint e = tiles::THREADS * o + 32 * sg + lane;
    if (e < tiles::ELEMENTS) {
      uint row = e / (HC * T);
      uint n = min(row, N - 1);
      uint d = first + e % T;
      uint t = min(d, D - 1) - first;
      float value =
          written_back<HC>(tile.x[o], tile.comb[o], tile.post[o], y[n * T + t]);
      chunk[e] = d < D ? value : 0;
      if (row < N && d < D) {
        streams[(n * HC + e / T % HC) * D + d] = value;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint groups = (D + C - 1) / C;
#pragma unroll
  for (int c = 0; c < T / C; c++) {
    float sums[WIDTH] = {};
#pragma unroll
    for (int i = 0; i < tiles::LOADS; i++) {
      uint element = 32 * i + lane;
      bool inside = element < HC * C;
      uint at = inside ? element / C * T + C * c + element % C : 0;
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        float value = inside ? chunk[n * HC * T + at] : 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          bool square = sg + SIMDGROUPS * e == M;
          float weight = square ? value : float(tile.weight[c][i][e]);
          sums[n * EACH + e] = fma(weight, value, sums[n * EACH + e]);
        }
      }
    }
    float sum = folds<WIDTH, 32>(sums, lane);
    uint value = lane / (32 / WIDTH);
    uint n = value / EACH;
    uint m = sg + SIMDGROUPS * (value % EACH);
    uint group = first / C + c;
    bool one = lane % (32 / WIDTH) == 0 && value < VALUES;
    if (one && n < N && m <= M && group < groups) {
      part[(n * groups + group) * (M + 1) + m] = sum;
    }
  }
}
