// The indexer's scores: a query's heads are turned and rounded, then
//   score[n, c] = sum_h w[n, h] relu(q[n, h] . key[c]) for c < ready[n],
// and minus infinity for the other entries.
//
// Grid (32 * ceil(HI / 8), shares, N): a threadgroup owns a row and a share of
// its ready entries. A simdgroup owns eight heads, which it prepares once; each
// half of it reads two entries at a time, a lane a 16th of the channels. All
// float; a product is summed over a lane's channels, then as in folds.h, a
// score over the heads of a simdgroup in pairs, then simdgroups upwards.
#include "folds.h"
#include "round_index.h"

constant constexpr uint HEADS = 8;     // of a simdgroup
constant constexpr uint ENTRIES = 16;  // between two barriers

// The simdgroup's heads: lane l of each half receives parts l and l + 16.
template <int HI, int C, bool ROUNDED, typename T>
METAL_FUNC void index_scores_queries(
    const device vec<float, C>* q,  // [HI, 32]
    T turn,                         // [R / 2] pairs: cosine, sine
    thread vec<float, C>* query,    // [HEADS, 2]
    int R,
    uint sg,
    uint lane) {
#pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    query[2 * h] = q[min(sg * HEADS + h, uint(HI - 1)) * 32 + lane];
  }
  float cosines[C / 2], sines[C / 2];
  for (int i = 0; i < C / 2; i++) {
    int r = C * int(lane) + 2 * i - (32 * C - R);
    cosines[i] = r < 0 ? 1 : turn[max(r, 0)];
    sines[i] = r < 0 ? 0 : turn[max(r, 0) + 1];
  }
#pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    vec<float, C> v = query[2 * h];
    float own[C];
    for (int i = 0; i < C; i += 2) {
      own[i] = v[i] * cosines[i / 2] - v[i + 1] * sines[i / 2];
      own[i + 1] = v[i + 1] * cosines[i / 2] + v[i] * sines[i / 2];
    }
    if (ROUNDED) {
      round_index<C>(own, lane);
    }
    for (int i = 0; i < C; i++) {
      float other = simd_shuffle_xor(own[i], 16);
      query[2 * h][i] = lane < 16 ? own[i] : other;
      query[2 * h + 1][i] = lane < 16 ? other : own[i];
    }
  }
}

template <
    int HI,
    int C,
    int SIMDGROUPS,
    bool ROUNDED,
    typename T,
    typename W,
    typename L>
METAL_FUNC void index_scores(
    const device vec<float, C>* q,     // [HI, 32] of a query, DI = 32 C
    T turn,                            // [N, R / 2] pairs: cosine, sine
    W w,                               // [HI] of a query
    const device vec<float, C>* keys,  // [CAPACITY, 32]
    L ready,                           // [N]
    device float* scores,              // [N, CAPACITY]
    threadgroup float* part,  // [2, SIMDGROUPS, ENTRIES]: steps in turn
    int R,
    uint CAPACITY,
    uint2 group,  // share, N: which
    uint shares,
    uint sg,
    uint lane) {
  uint n = group.y;
  uint limit = ready[n];
  uint tid = 32 * sg + lane;
  scores += n * CAPACITY;
  for (uint c = limit + group.x * 32 * SIMDGROUPS + tid; c < CAPACITY;
       c += shares * 32 * SIMDGROUPS) {
    scores[c] = -INFINITY;
  }
  uint steps = (limit + shares * ENTRIES - 1) / (shares * ENTRIES);
  uint start = group.x * steps * ENTRIES;
  if (start >= limit) {
    return;
  }
  uint stop = min(start + steps * ENTRIES, limit);

  vec<float, C> query[2 * HEADS];
  index_scores_queries<HI, C, ROUNDED>(q, turn + n * R, query, R, sg, lane);
  // After a fold a lane has the product of one entry of two and one head.
  uint slot = lane % 16;
  uint own = sg * HEADS + lane % HEADS;
  float weight = own < HI ? w[min(own, uint(HI - 1))] : 0;

  for (uint base = start; base < stop; base += ENTRIES) {
    threadgroup float* sums =
        part + base / ENTRIES % 2 * (ENTRIES * SIMDGROUPS);
    // More at a time takes registers that a second threadgroup needs.
#pragma unroll 2
    for (uint e = 0; e < ENTRIES; e += 4) {
      // Lanes 8 apart read two entries in turn, and exchange the second ones.
      // Past the end the last entry stands in.
      uint mine = base + e + 2 * (lane / 16) + slot / HEADS;
      float products[2][HEADS];
#pragma unroll
      for (uint b = 0; b < 2; b++) {
        uint c = min(mine ^ b, limit - 1);
        vec<float, C> low = keys[c * 32 + slot];
        vec<float, C> high = keys[c * 32 + slot + 16];
#pragma unroll
        for (uint h = 0; h < HEADS; h++) {
          float product = 0;
          for (int i = 0; i < C; i++) {
            product = fma(query[2 * h][i], low[i], product);
          }
          for (int i = 0; i < C; i++) {
            product = fma(query[2 * h + 1][i], high[i], product);
          }
          products[b][h] = product;
        }
      }
#pragma unroll
      for (uint h = 0; h < HEADS; h++) {
        products[0][h] += simd_shuffle_xor(products[1][h], HEADS);
      }
      float score = weight * max(folds<HEADS, HEADS>(products[0], lane), 0.0f);
      for (uint apart = 1; apart < HEADS; apart *= 2) {
        score += simd_shuffle_xor(score, apart);
      }
      if (lane % HEADS == 0) {
        sums[sg * ENTRIES + mine - base] = score;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < ENTRIES && base + tid < stop) {
      float score = 0;
      for (uint s = 0; s < SIMDGROUPS; s++) {
        score += sums[s * ENTRIES + tid];
      }
      scores[base + tid] = score;
    }
  }
}
