// The indexer's scores: a query's heads are turned and rounded, then
//   score[n, c] = sum_h w[n, h] relu(q[n, h] . key[c]) for c < ready[n],
// and minus infinity for the other entries.
//
// Grid (32 * ceil(HI / 8), stretches, N): a threadgroup owns a row, and of its
// entries every stretches-th stretch of 64. A simdgroup owns eight heads, which
// it prepares once, and a lane two entries of a stretch. Queries and keys are
// staged 32 channels at a time. All float; a product is summed over channels
// upwards, a score over the heads of a simdgroup, then simdgroups, upwards.
#include "round_index.h"

constant constexpr uint HEADS = 8;  // of a simdgroup
constant constexpr uint ENTRIES = 64;
constant constexpr uint PITCH = 9;  // float4 of a staged key: 8, and 1 to
                                    // spread a simdgroup's reads over the banks

// The C channels of a head that a lane holds, after the rotation.
template <int C, typename T>
METAL_FUNC void index_scores_query(
    const device float* q,  // the head
    T turn,                 // the row's
    thread float* v,
    uint R,
    uint lane) {
  for (uint i = 0; i < C; i++) {
    uint d = lane * C + i;
    v[i] = q[d];
    if (d >= 32 * C - R) {
      uint pair = (d - (32 * C - R)) / 2 * 2;
      float other = q[d ^ 1];
      v[i] = v[i] * turn[pair] +
             other * (d % 2 ? turn[pair + 1] : -turn[pair + 1]);
    }
  }
}

template <int HI, int C, bool ROUNDED, typename T, typename W, typename L>
METAL_FUNC void index_scores(
    const device float* q,        // [N, HI, DI], DI = 32 C
    T turn,                       // [N, R / 2] pairs: cosine, sine
    W w,                          // [N, HI]
    const device float* keys,     // [CAPACITY, DI]
    L ready,                      // [N]
    device float* scores,         // [N, CAPACITY]
    threadgroup float4* queries,  // [HEADS * simdgroups, 8]
    threadgroup float4* staged,   // [ENTRIES, PITCH]
    threadgroup float* part,      // [simdgroups, ENTRIES]
    uint R,
    uint CAPACITY,
    uint2 group,  // stretches, N: which
    uint stretches,
    uint simdgroups,
    uint sg,
    uint lane) {
  uint n = group.y;
  uint limit = ready[n];
  float query[HEADS][C] = {};
  float weight[HEADS] = {};
  if (group.x * ENTRIES < limit) {
#pragma unroll
    for (uint h = 0; h < HEADS; h++) {
      uint head = min(sg * HEADS + h, uint(HI - 1));
      index_scores_query<C>(
          q + (n * HI + head) * 32 * C, turn + n * R, query[h], R, lane);
      if (ROUNDED) {
        round_index<C>(query[h], lane);
      }
      weight[h] = sg * HEADS + h < HI ? w[n * HI + head] : 0;
    }
  }

  uint tid = 32 * sg + lane;
  for (uint start = group.x * ENTRIES; start < CAPACITY;
       start += stretches * ENTRIES) {
    device float* out = scores + n * CAPACITY + start;
    uint entries = min(ENTRIES, CAPACITY - start);
    if (start >= limit) {
      for (uint e = tid; e < entries; e += 32 * simdgroups) {
        out[e] = -INFINITY;
      }
      continue;
    }
    float product[HEADS][2] = {};
    for (uint chunk = 0; chunk < C; chunk++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = tid; i < ENTRIES * 8; i += 32 * simdgroups) {
        uint c =
            min(start + i / 8, limit - 1);  // past the end the last stands in
        staged[i / 8 * PITCH + i % 8] =
            ((const device float4*)keys)[(c * C + chunk) * 8 + i % 8];
      }
      if (lane * C / 32 == chunk) {
        for (uint h = 0; h < HEADS; h++) {
          for (uint i = 0; i < C; i++) {
            uint d = lane * C % 32 + i;
            ((threadgroup float*)queries)[(sg * HEADS + h) * 32 + d] =
                query[h][i];
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint j = 0; j < 8; j++) {
        float4 low = staged[lane * PITCH + j];
        float4 high = staged[(lane + 32) * PITCH + j];
        for (uint h = 0; h < HEADS; h++) {
          float4 channels = queries[(sg * HEADS + h) * 8 + j];
          for (uint i = 0; i < 4; i++) {
            product[h][0] = fma(channels[i], low[i], product[h][0]);
            product[h][1] = fma(channels[i], high[i], product[h][1]);
          }
        }
      }
    }

    float2 sum = 0;
    for (uint h = 0; h < HEADS; h++) {
      sum += weight[h] * max(float2(product[h][0], product[h][1]), 0.0f);
    }
    part[sg * ENTRIES + lane] = sum.x;
    part[sg * ENTRIES + lane + 32] = sum.y;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = tid; e < entries; e += 32 * simdgroups) {
      float score = 0;
      for (uint s = 0; s < simdgroups; s++) {
        score += part[s * ENTRIES + e];
      }
      out[e] = start + e < limit ? score : -INFINITY;
    }
  }
}
