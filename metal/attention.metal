// Attention with a sink over a list of keys, which are also the values,
//   out[n, h] = sum_k p_k key_k / sum_k p_k,
//   p_k = exp(q[n, h] . key_k / sqrt(DH)),
// where the sink of the head adds its exp to the denominator alone. q is
// normalised to mean(q^2) = 1 and its last R channels are rotated; those of
// the result are rotated back.
//
// The keys of query n are the ring's rows of the last WINDOW positions, then
// the first entries or those selected for it. They form at most 32 splits of
// whole FEW; which keys a split holds depends on the length of the query's own
// list. A threadgroup stages FEW keys of a split while their FEW followers are
// read, a simdgroup one of them. A simdgroup owns HEADS heads, a lane a 32nd of
// the channels; a score and its weight are one lane's.
// All float. Sums run over a lane's channels, then as in folds.h; over keys
// upwards, then splits, DEEP and DEEP; in the denominator over every FEW-th key
// first.
#include "attention.h"
#include "folds.h"

// Grid (32 * simdgroups of HEADS heads, SPLITS, N).
template <int DH, int R, int HEADS, typename T, typename I>
METAL_FUNC void attention_part(
    const device float* q,  // [N, STRIDE], of which H * DH columns
    T turns,                // [N, R / 2] pairs: cosine, sine
    attention_rows from,
    I ids,                       // [TOPK] of the query
    device float* part,          // [N, SPLITS, H, DH], relative to its top
    device float* stat,          // [N, SPLITS, H, 2]: top score, sum of exp
    threadgroup float4* staged,  // [2, FEW, DH / 4]: steps in turn
    attention_keys list,
    float eps,
    int H,
    int STRIDE,
    uint3 group,  // of FEW * HEADS heads, split, N: which
    uint sg,
    uint lane) {
  int n = group.z;
  int head = (group.x * FEW + sg) * HEADS;
  int size = attention_split_size(list);
  int first = group.y * size;
  int last = min(list.window + list.entries, first + size);
  if (first >= last) {
    return;
  }
  constexpr int J = DH / 128;
  float4 query[HEADS][J], sum[HEADS][J], next[J];
  uint place = 0;  // of the lane's key among 32
  attention_read<J>(list, from, ids, first, first, last, place, next, sg, lane);
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    int own = n * STRIDE + min(head + h, H - 1) * DH;
    const device float4* row = (const device float4*)(q + own);
    float squares = 0;
    for (int j = 0; j < J; j++) {
      query[h][j] = row[32 * j + lane];
      squares += dot(query[h][j], query[h][j]);
      sum[h][j] = 0;
    }
    float scale = rsqrt(simd_sum(squares) / DH + eps) * rsqrt(float(DH));
    for (int j = 0; j < J; j++) {
      int r = 4 * (32 * j + int(lane)) - (DH - R);
      query[h][j] *= scale;
      if (r >= 0) {
        query[h][j] = attention_turn<false>(query[h][j], turns + n * R + r);
      }
    }
  }

  // Of the pairs of a head and one of FEW keys a lane has one.
  constexpr int PAIRS = HEADS * FEW;
  constexpr int APART = 32 / PAIRS;  // lanes of a pair
  int own = lane / APART % FEW;
  float top = -INFINITY;
  float total = 0;
  for (int k = first; k < last; k += FEW) {
    threadgroup float4* keys =
        staged + (k - first) / FEW % 2 * (FEW * 32 * J) + lane;
    for (int j = 0; j < J; j++) {
      keys[32 * (sg * J + j)] = next[j];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k + FEW < last) {
      attention_read<J>(
          list, from, ids, first, k + FEW, last, place, next, sg, lane);
    }
    float products[PAIRS];
#pragma unroll
    for (int u = 0; u < FEW; u++) {
      float4 key[J];
      for (int j = 0; j < J; j++) {
        key[j] = keys[32 * (u * J + j)];
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float product = 0;
        for (int j = 0; j < J; j++) {
          for (int i = 0; i < 4; i++) {
            product = fma(query[h][j][i], key[j][i], product);
          }
        }
        products[h * FEW + u] = product;
      }
    }
    float score = folds<PAIRS, 32>(products, lane);
    score = k + own < last ? score : -INFINITY;
    float highest = max(top, score);
    for (int apart = APART; apart < APART * FEW; apart *= 2) {
      highest = max(highest, simd_shuffle_xor(highest, apart));
    }
    float fade = exp(top - highest);
    float weight = exp(score - highest);
    total = total * fade + weight;
    top = highest;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float faded = simd_shuffle(fade, APART * FEW * h);
      for (int j = 0; j < J; j++) {
        sum[h][j] *= faded;
      }
    }
#pragma unroll
    for (int u = 0; u < FEW; u++) {
      float4 key[J];
      for (int j = 0; j < J; j++) {
        key[j] = keys[32 * (u * J + j)];
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float share = simd_shuffle(weight, APART * (FEW * h + u));
        for (int j = 0; j < J; j++) {
          sum[h][j] += share * key[j];
        }
      }
    }
  }

  for (int apart = APART; apart < APART * FEW; apart *= 2) {
    total += simd_shuffle_xor(total, apart);
  }
  int to = (n * SPLITS + group.y) * H + head;
  int h = lane / (APART * FEW);
  if (lane % (APART * FEW) == 0 && head + h < H) {
    stat[2 * (to + h)] = top;
    stat[2 * (to + h) + 1] = total;
  }
#pragma unroll
  for (int h = 0; h < HEADS && head + h < H; h++) {
    for (int j = 0; j < J; j++) {
      ((device float4*)(part + (to + h) * DH))[32 * j + lane] = sum[h][j];
    }
  }
}

// Grid (DH, H, N): a threadgroup of FEW simdgroups owns 128 channels of a head,
// a simdgroup DEEP splits of them, a lane four channels.
template <int DH, int R, typename T, typename S>
METAL_FUNC void attention_merge(
    const device float* part,
    const device float* stat,
    T turns,
    S sink,                      // [H]
    device float* out,           // [N, H, DH]
    threadgroup float* weights,  // [SPLITS]
    threadgroup float4* sums,    // [FEW, 32]
    attention_keys list,
    int H,
    uint3 group,  // of 128 channels, H, N: which
    uint sg,
    uint lane) {
  int size = attention_split_size(list);
  int keys = list.window + list.entries;
  int h = group.y;
  int n = group.z;
  int at = 32 * group.x + lane;  // which four channels
  float sunk = sink[h];
  const device float4* from = (const device float4*)part;
  float4 some[DEEP];
#pragma unroll
  for (int i = 0; i < DEEP; i++) {
    int s = sg * DEEP + i;
    some[i] = 0;
    if (s * size < keys) {
      some[i] = from[((n * SPLITS + s) * H + h) * (DH / 4) + at];
    }
  }
  if (sg == 0) {  // lane s weighs split s
    const device float* own = stat + 2 * ((n * SPLITS + lane) * H + h);
    bool filled = int(lane) * size < keys;
    float top = filled ? own[0] : -INFINITY;
    float highest = max(simd_max(top), sunk);
    float weight = exp(top - highest);
    float total = simd_sum(filled ? own[1] * weight : 0);
    weights[lane] = weight / (total + exp(sunk - highest));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 sum = 0;
#pragma unroll
  for (int i = 0; i < DEEP; i++) {
    sum += weights[sg * DEEP + i] * some[i];
  }
  sums[32 * sg + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    for (int s = 1; s < FEW; s++) {
      sum += sums[32 * s + lane];
    }
    int r = 4 * at - (DH - R);
    if (r >= 0) {
      sum = attention_turn<true>(sum, turns + n * R + r);
    }
    ((device float4*)(out + (n * H + h) * DH))[at] = sum;
  }
}
