// Hyper-connections before a sublayer: the mixture of the streams x, and what
// the sublayer reads of them,
//   m = (fn x) / sqrt(mean(x^2) + norm_eps) * scale + base over all K = HC * D,
//   pre = sigmoid + hc_eps, post = 2 sigmoid, comb = Sinkhorn of a softmax,
//   y = norm * z / sqrt(mean(z^2) + norm_eps), z = sum_j pre[j] * x[j].
//
// Two launches, all float. The first is left out where what wrote x has given
// part of the mixture (streams.h); in it a threadgroup owns a chunk of 256
// channels for all tokens, and a simdgroup reads its rows of fn once and
// multiplies them with each token. In the second two threadgroups own a token,
// one for y and one for post and comb. Sums run over a lane's channels, then
// the simdgroup (sums.h), then simdgroups or parts; over j upwards.
#include "sums.h"

constant constexpr uint CHUNK = 256;

// Grid (256, ceil(K / CHUNK)).
template <int HC, int ROWS, typename T>
METAL_FUNC void hc_mix_part(
    const device float* x,  // [N, HC, D], N of ROWS - 1 or ROWS
    const device T* fn,     // [M, K]
    device float* part,     // [N, CHUNKS, M + 1], the last: sum of x^2
    uint N,
    uint D,
    uint2 group,  // which chunk of how many
    uint sg,
    uint lane) {
  constexpr uint SIMDGROUPS = CHUNK / 32;
  constexpr uint M = (2 + HC) * HC;
  constexpr uint EACH = (M + SIMDGROUPS - 1) / SIMDGROUPS;  // rows of fn
  constexpr uint VALUES = EACH * ROWS;
  constexpr uint WIDTH = VALUES > 16 ? 32 : VALUES > 8 ? 16 : 8;
  uint K = HC * D;
  float sums[WIDTH] = {};
  float squares = 0;
#pragma unroll
  for (uint i = 0; i < SIMDGROUPS; i++) {
    uint k = group.x * CHUNK + 32 * i + lane;
    float weight[EACH];
#pragma unroll
    for (uint e = 0; e < EACH; e++) {
      uint m = min(sg + SIMDGROUPS * e, M - 1);
      weight[e] = k < K ? float(fn[m * K + k]) : 0;
    }
#pragma unroll
    for (uint n = 0; n < ROWS; n++) {
      float channel = k < K ? x[min(n, N - 1) * K + k] : 0;
#pragma unroll
      for (uint e = 0; e < EACH; e++) {
        sums[n * EACH + e] = fma(weight[e], channel, sums[n * EACH + e]);
      }
    }
    float channel = k < K ? x[min(sg, N - 1) * K + k] : 0;
    squares = fma(channel, channel, squares);
  }
  squares = simd_sum(squares);
  float sum = lane_sums<WIDTH>(sums, lane);
  uint n = lane / EACH;
  uint m = sg + SIMDGROUPS * (lane % EACH);
  if (lane < VALUES && n < N && m < M) {
    part[(n * group.y + group.x) * (M + 1) + m] = sum;
  }
  // Simdgroup n has added the squares of token n.
  if (lane == 0 && sg < N) {
    part[(sg * group.y + group.x) * (M + 1) + M] = squares;
  }
}

// Divisions of comb[j, k], held in lane j * HC + k, by rows and columns.
template <int HC, int ITERATIONS>
METAL_FUNC float hc_mix_sinkhorn(float a, float hc_eps) {
  float top = a;
  for (ushort k = 1; k < HC; k *= 2) {
    top = max(top, simd_shuffle_xor(top, k));
  }
  a = exp(a - top);
  for (int i = 0; i < ITERATIONS; i++) {
    float row = a;
    for (ushort k = 1; k < HC; k *= 2) {
      row += simd_shuffle_xor(row, k);
    }
    // The first division is the softmax's.
    a = i == 0 ? a / row + hc_eps : a / (row + hc_eps);
    float column = a;
    for (ushort j = HC; j < HC * HC; j *= 2) {
      column += simd_shuffle_xor(column, j);
    }
    a /= column + hc_eps;
  }
  return a;
}

// Grid (32 * SIMDGROUPS, N, 2). Lane m of a simdgroup adds every SIMDGROUPS-th
// part of value m; HC is 2 or 4 and lanes past the values repeat others'. For
// y a thread owns AHEAD channels, 32 * SIMDGROUPS apart.
template <
    int HC,
    int ITERATIONS,
    int SIMDGROUPS,
    int AHEAD,
    typename S,
    typename B,
    typename W>
METAL_FUNC void hc_mix_finish(
    const device float* x,       // [N, HC, D]
    const device float* part,    // [N, PARTS, M + 1]
    S scale,                     // [3]
    B base,                      // [M]
    W norm,                      // [D]
    device float* y,             // [N, D]
    device float* post,          // [N, HC]
    device float* comb,          // [N, HC, HC]
    threadgroup float* sums,     // [SIMDGROUPS, 32]
    threadgroup float* weights,  // [HC], pre
    float hc_eps,
    float norm_eps,
    uint D,
    uint PARTS,
    uint n,
    bool for_y,
    uint sg,
    uint lane) {
  constexpr uint M = (2 + HC) * HC;
  constexpr uint THREADS = 32 * SIMDGROUPS;
  // A thread's channels are under way while the coefficients are made, and so
  // are all weights: no cache holds them.
  float ahead[AHEAD][HC];
  float gain[AHEAD];
#pragma unroll
  for (uint i = 0; i < AHEAD; i++) {
    uint d = min(THREADS * i + 32 * sg + lane, D - 1);
    gain[i] = for_y ? float(norm[d]) : 0;
#pragma unroll
    for (uint j = 0; j < HC; j++) {
      ahead[i][j] = for_y ? x[(n * HC + j) * D + d] : 0;
    }
  }
  uint gate = lane % (2 * HC);
  uint entry = lane % (HC * HC);
  float2 line = float2(scale[gate / HC], base[gate]);
  float2 entry_line = float2(scale[2], base[2 * HC + entry]);
  uint value = min(lane, M);
  float sum = 0;
  // Loads of a batch are under way together; past the end they add nothing.
  constexpr uint BATCH = 16;
#pragma unroll 1
  for (uint p = sg; p < PARTS; p += BATCH * SIMDGROUPS) {
    float added[BATCH];
#pragma unroll
    for (uint i = 0; i < BATCH; i++) {
      uint at = min(p + SIMDGROUPS * i, PARTS - 1);
      added[i] = part[(n * PARTS + at) * (M + 1) + value];
    }
#pragma unroll
    for (uint i = 0; i < BATCH; i++) {
      sum += p + SIMDGROUPS * i < PARTS ? added[i] : 0;
    }
  }
  sums[32 * sg + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
#pragma unroll
    for (uint s = 1; s < SIMDGROUPS; s++) {
      sum += sums[32 * s + lane];
    }
    float scaled = rsqrt(simd_shuffle(sum, M) / (HC * D) + norm_eps);
    float m = simd_shuffle(sum, gate) * scaled * line.x + line.y;
    float sigmoid = 1 / (1 + exp(-m));
    if (for_y) {
      if (lane < HC) {
        weights[lane] = sigmoid + hc_eps;
      }
    } else {
      if (lane >= HC && lane < 2 * HC) {
        post[n * HC + lane - HC] = 2 * sigmoid;
      }
      float a = simd_shuffle(sum, 2 * HC + entry) * scaled * entry_line.x +
                entry_line.y;
      a = hc_mix_sinkhorn<HC, ITERATIONS>(a, hc_eps);
      if (lane < HC * HC) {
        comb[n * HC * HC + lane] = a;
      }
    }
  }
  if (!for_y) {
    return;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float z[AHEAD] = {};
  float squares = 0;
#pragma unroll
  for (uint i = 0; i < AHEAD; i++) {
#pragma unroll
    for (uint j = 0; j < HC; j++) {
      z[i] += weights[j] * ahead[i][j];
    }
    squares += THREADS * i + 32 * sg + lane < D ? z[i] * z[i] : 0;
  }
  squares = simd_sum(squares);
  if (lane == 0) {
    sums[sg] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  squares = 0;
#pragma unroll
  for (uint s = 0; s < SIMDGROUPS; s++) {
    squares += sums[s];
  }
  float scaled = rsqrt(squares / D + norm_eps);
#pragma unroll
  for (uint i = 0; i < AHEAD; i++) {
    uint d = THREADS * i + 32 * sg + lane;
    if (d < D) {
      y[n * D + d] = z[i] * scaled * gain[i];
    }
  }
}
