// What the two launches of the experts share: who computes for whom, and the
// products of a few rows with a few rows of weights.
#include "dequantize.h"
#include "sums.h"

// The slots (row * K + place, at most 64) with the expert of `slot`, a bit
// each. All lanes take part. The first of them computes for all: every slot
// keeps a sum of its own.
template <typename I>
METAL_FUNC ulong together(I ids, uint count, uint slot, uint lane) {
  uint expert = ids[slot];
  ulong same = 0;
  for (uint first = 0; first < count; first += 32) {
    uint s = first + lane;
    bool equal = s < count && uint(ids[s]) == expert;
    same |= ulong(simd_vote::vote_t(simd_ballot(equal))) << first;
  }
  return same;
}

// Move the next M slots from `left` to `slots`; the number of them. `slot` is
// the first.
template <int M>
METAL_FUNC uint
next(thread ulong& left, thread uint& slot, thread uint* slots) {
  uint live = 0;
  for (uint m = 0; m < M; m++) {
    slots[m] = slot;
    live += left ? 1 : 0;
    left &= left - 1;
    while (left && !(left >> slot & 1)) {
      slot++;
    }
  }
  return live;
}

// How many simdgroups share the columns of a row.
constexpr METAL_FUNC int blocks(int columns) { return (columns + 1023) / 1024; }

// 32 columns of a row, which a lane keeps in registers while it meets one row
// of weights after the other, and their sums in groups of 16.
struct columns {
  float x[32];
  float sums[2];
};

METAL_FUNC columns keep(const device float* from, bool inside) {
  columns kept;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float4 four = inside ? ((const device float4*)from)[j] : float4(0);
    kept.x[4 * j] = four.x;
    kept.x[4 * j + 1] = four.y;
    kept.x[4 * j + 2] = four.z;
    kept.x[4 * j + 3] = four.w;
  }
#pragma unroll
  for (int g = 0; g < 2; g++) {
    kept.sums[g] = kept.x[16 * g];
#pragma unroll
    for (int j = 1; j < 16; j++) {
      kept.sums[g] += kept.x[16 * g + j];
    }
  }
  return kept;
}

// 32 columns of R rows of weights, as loaded.
template <int R>
struct weights {
  uint raw[R][32];
  float2 scale[R][2];
};

template <int R, typename W>
METAL_FUNC void hold(W w, uint i, uint stride, thread weights<R>& to) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    fetch<8>(w, i + r * stride, to.raw[r]);
#pragma unroll
    for (int g = 0; g < 4 / W::GROUP; g++) {
      to.scale[r][g] = scaling(w, i + r * stride + 8 * W::GROUP * g);
    }
  }
}

// Products of R rows of weights with M rows: to[r * M + m]. Of a group the
// codes count first, its first and last four columns of eight apart, upwards,
// then its scale: every step is an explicit fma, which no compiler may contract
// in another way. Rows of weights alternate, for none waits for the other.
template <int R, int M, typename W>
METAL_FUNC void multiply(
    W w,
    const thread weights<R>& held,
    const thread columns* rows,
    thread float* to) {
  constexpr int GROUP = W::GROUP;
  float part[R][M][2];
#pragma unroll
  for (int o = 0; o < 4; o++) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float v[8];
      octet(w, held.raw[r], o, v);
#pragma unroll
      for (int m = 0; m < M; m++) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
          float before = o % GROUP || c % 4 ? part[r][m][c / 4] : 0;
          part[r][m][c / 4] = fma(v[c], rows[m].x[8 * o + c], before);
        }
        if (o % GROUP == GROUP - 1) {
          float2 s = held.scale[r][o / GROUP];
          float sum = o < GROUP ? 0 : to[r * M + m];
          if (W::MINIMA) {
            float x = rows[m].sums[o / GROUP];
            x = GROUP == 4 ? x + rows[m].sums[1] : x;
            sum = fma(-s.y, x, sum);
          }
          to[r * M + m] = fma(s.x, part[r][m][0] + part[r][m][1], sum);
        }
      }
    }
  }
}

// Sums over the simdgroup of M rows with STEPS times R rows of a, the first at
// element i, and R of b, at j; the next ones `step` elements on. The sums of
// row m, in that order, go to that `to` which the lanes of m % M have.
template <int STEPS, int R, int M, typename W>
METAL_FUNC void sweep(
    W a,
    W b,
    uint i,
    uint j,
    uint step,
    uint stride,
    const thread columns* rows,
    threadgroup float* to,
    uint lane) {
  weights<R> of_a, of_b;
  hold(a, i, stride, of_a);
#pragma unroll 1
  for (int s = 0; s < STEPS; s++) {
    // While one is multiplied the other's loads are under way.
    hold(b, j + s * step, stride, of_b);
    float sums[2 * R * M];
    multiply<R, M>(a, of_a, rows, sums);
    hold(a, i + min(s + 1, STEPS - 1) * step, stride, of_a);
    multiply<R, M>(b, of_b, rows, sums + R * M);
    float sum = lane_sums<2 * R * M>(sums, lane);
    if (lane < 2 * R * M) {
      to[2 * R * s + lane / M] = sum;
    }
  }
}
