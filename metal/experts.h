// What the two launches of the experts share: the products of a row, 32 of its
// columns a lane, with many rows of weights.
#include "dequantize.h"
#include "rows.h"

// How many simdgroups share the columns of a row.
constexpr METAL_FUNC int blocks(int columns) { return (columns + 1023) / 1024; }

// How many rows of weights a lane holds at a time: few of the large ones.
template <typename W>
constexpr METAL_FUNC int held(int most) {
  constexpr bool few = W::WORDS == 2 || W::GROUP == 2;
  constexpr int wanted = W::WORDS > 2 ? 1 : few ? 2 : 4;
  return wanted < most ? wanted : most;
}

// 32 columns of a row, which a lane keeps in registers while it meets one row
// of weights after the other, and their sums in groups of 16.
struct columns {
  float x[32];
  float sums[2];
};

// The columns of a lane in a block of 1024, zeros past the D of x. They come by
// way of `stage`, for neighbouring lanes to load neighbouring words.
template <int D, typename W>
METAL_FUNC columns keep(
    const device float* x,
    uint block,
    threadgroup float4* stage,  // [128], of the simdgroup
    uint lane) {
  // Half a lane's columns, of eight lanes at a time.
  uint column = 1024 * block + 32 * (lane / 4);
  const device float4* from = (const device float4*)(x + column) + lane % 4;
  float4 fours[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    bool inside = D % 1024 == 0 || column + 256 * (j % 4) < D;
    fours[j] = inside ? from[64 * (j % 4) + j / 4 * 4] : float4(0);
  }
  columns kept;
#pragma unroll
  for (int part = 0; part < 2; part++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // Neighbouring lanes meet in different banks, here and below.
      stage[32 * j + (lane ^ lane / 8)] = fours[4 * part + j];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float4 four = stage[4 * lane + (j ^ lane / 2 % 4)];
      kept.x[16 * part + 4 * j] = four.x;
      kept.x[16 * part + 4 * j + 1] = four.y;
      kept.x[16 * part + 4 * j + 2] = four.z;
      kept.x[16 * part + 4 * j + 3] = four.w;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (int g = 0; g < 2; g++) {
    kept.sums[g] = kept.x[16 * g];
#pragma unroll
    for (int j = 1; j < 16; j++) {
      kept.sums[g] += kept.x[16 * g + j];
    }
  }
#pragma unroll
  for (int j = 0; j < 32; j++) {
    kept.x[j] *= 1.0f / (1 << lift<W>(j));
  }
  return kept;
}

// 32 columns of R rows of weights, as loaded.
template <int R>
struct weights {
  uint raw[R][32];
  uint2 packed[R][2];
};

// From element i of w [.., D] on.
template <int D, int R, typename W>
METAL_FUNC void hold(W w, uint i, thread weights<R>& to) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    fetch<8>(rows(w, r * D), i, to.raw[r]);
#pragma unroll
    for (int g = 0; g < 4 / W::GROUP; g++) {
      to.packed[r][g] = packed(rows(w, r * D + 8 * W::GROUP * g), i);
    }
  }
}

// Products of R rows of weights with a row. Of a group the codes count first,
// its first and last four columns of eight apart, upwards, then its scale:
// every step is an explicit fma, which no compiler may contract in another way.
// Rows of weights alternate, for none waits for the other.
template <int R, typename W>
METAL_FUNC void multiply(
    W w,
    const thread weights<R>& held,
    const thread columns& row,
    thread float* to) {
  constexpr int GROUP = W::GROUP;
  float part[R][2];
#pragma unroll
  for (int o = 0; o < 4; o++) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float v[8];
      lifted(w, held.raw[r], o, v);
#pragma unroll
      for (int c = 0; c < 8; c++) {
        float before = o % GROUP || c % 4 ? part[r][c / 4] : 0;
        part[r][c / 4] = fma(v[c], row.x[8 * o + c], before);
      }
      if (o % GROUP == GROUP - 1) {
        float2 s = scaling(w, held.packed[r][o / GROUP]);
        float sum = o < GROUP ? 0 : to[r];
        if (W::MINIMA) {
          float x = row.sums[o / GROUP];
          x = GROUP == 4 ? x + row.sums[1] : x;
          sum = fma(-s.y, x, sum);
        }
        to[r] = fma(s.x, part[r][0] + part[r][1], sum);
      }
    }
  }
}

// Lane l receives the sum of v[l / (32 / WIDTH)], over lanes 16, 8, 4, 2 and 1
// apart. v is lost.
template <int WIDTH>
METAL_FUNC float spread_sums(thread float* v, uint lane) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    int rest = WIDTH * apart / 32;
    bool upper = lane & apart;
    if (rest == 0) {
      v[0] += simd_shuffle_xor(v[0], apart);
    }
    // Each of two lanes goes on with the half of the values that it keeps.
#pragma unroll
    for (int i = 0; i < rest; i++) {
      float given = upper ? v[i] : v[i + rest];
      v[i] = (upper ? v[i + rest] : v[i]) + simd_shuffle_xor(given, apart);
    }
  }
  return v[0];
}

// Sums over the simdgroup of a block of a row with STEPS times R rows of a, the
// first at element i, and R of b, at j; the next ones R * HOP elements on. They
// go to `to` in that order.
template <int STEPS, int R, int D, int HOP, typename W>
METAL_FUNC void sweep(
    W a,
    W b,
    uint i,
    uint j,
    const device float* x,  // [D]
    uint block,
    threadgroup float4* stage,  // [128]
    threadgroup float* to,      // [STEPS * 2 * R]
    uint lane) {
  uint column = 1024 * block + 32 * lane;
  column = column < D ? column : 0;
  i += column;
  j += column;
  weights<R> of_a, of_b;
  // The row first, and registers for its words are free again.
  columns row = keep<D, W>(x, block, stage, lane);
  hold<D>(a, i, of_a);
#pragma unroll 1
  for (int s = 0; s < STEPS; s++) {
    // While one is multiplied the other's loads are under way.
    hold<D>(b, j + s * R * HOP, of_b);
    float sums[2 * R];
    multiply(a, of_a, row, sums);
    hold<D>(a, i + min(s + 1, STEPS - 1) * R * HOP, of_a);
    multiply(b, of_b, row, sums + R);
    float sum = spread_sums<2 * R>(sums, lane);
    if (lane % (16 / R) == 0) {
      to[2 * R * s + lane / (16 / R)] = sum;
    }
  }
}
