// The chain of a draft block. For each position at = 0, 1, ...
//   logits = u[at] + w2 e, e = w1[token before], token = argmax(logits),
// ties to the lowest id. A launch does one position: each of its threadgroups
// picks the token before anew, from what the last launch found, so that a
// position costs one launch. One more picks the last token and copies the e.
//
// Grid (256 * ceil(V / 256)) and (256, N): a simdgroup owns 32 logits, four at
// a time. All float, weights as dequantize.h makes them; a sum runs over a
// lane's channels upwards, then the simdgroup, then u is added.
#include "argmax.h"
#include "embed.h"

constant constexpr int TILE = 4;

// The token before position `at`: the anchor, or the best of the last launch.
template <typename K, typename P>
METAL_FUNC uint markov_token(
    K known,
    P found,  // [FOUND, 2]: the best logit's bits, its id
    uint FOUND,
    uint at,
    threadgroup float2* values,
    threadgroup uint* places,
    uint tid,
    uint threads) {
  if (at == 0) {
    return known[0];
  }
  top t = none();
  for (uint i = tid; i < FOUND; i += threads) {
    t = better(t, of(as_type<float>(found[2 * i]), found[2 * i + 1]));
  }
  return best(t, values, places, tid, threads).id;
}

template <typename A, typename B, typename K, typename P>
METAL_FUNC void markov(
    const device float* u,  // [N, V]
    K known,                // [max(at, 1)]: the anchor, tokens
    P found,
    A w1,                        // [V, R]
    B w2,                        // [V, R]
    device float* logits,        // [V]
    device int* tokens,          // [at + 1]: the anchor, tokens
    device uint* best_of,        // [threadgroups, 2]
    threadgroup float4* e,       // [R / 4]
    threadgroup float2* values,  // of the simdgroups
    threadgroup uint* places,
    uint at,
    uint V,
    uint R,
    uint FOUND,
    uint group,
    uint tid,
    uint threads) {
  uint before =
      markov_token(known, found, FOUND, at, values, places, tid, threads);
  for (uint k = 8 * tid; k < R; k += 8 * threads) {
    float4 v[2];
    eight(w1, before * R + k, v);
    e[k / 4] = v[0];
    e[k / 4 + 1] = v[1];
  }
  if (group == 0 && tid <= at) {
    tokens[tid] = tid < at ? known[tid] : before;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint lane = tid % 32;
  uint v = group * threads + tid;
  float logit = 0;
  for (uint i = 0; i < 32; i += TILE) {
    float sum[TILE] = {};
    for (uint k = 8 * lane; k < R; k += 256) {
      float4 weight[TILE][2];
      for (int t = 0; t < TILE; t++) {
        // Past the end the last row stands in.
        eight(w2, min(v - lane + i + t, V - 1) * R + k, weight[t]);
      }
      for (int j = 0; j < 2; j++) {
        float4 channels = e[k / 4 + j];
        for (int t = 0; t < TILE; t++) {
          for (int c = 0; c < 4; c++) {
            sum[t] = fma(weight[t][j][c], channels[c], sum[t]);
          }
        }
      }
    }
    for (int t = 0; t < TILE; t++) {
      float total = simd_sum(sum[t]);
      logit = lane == i + t ? total : logit;
    }
  }
  top t = none();
  if (v < V) {
    logit += u[at * V + v];
    logits[v] = logit;
    t = of(logit, v);
  }
  t = best(t, values, places, tid, threads);
  if (tid == 0) {
    best_of[2 * group] = as_type<uint>(t.first);
    best_of[2 * group + 1] = t.id;
  }
}

template <typename A, typename K, typename P>
METAL_FUNC void markov_finish(
    A w1,
    K known,  // [N]
    P found,
    device int* tokens,  // [N]
    device float* e,     // [N, R]
    threadgroup float2* values,
    threadgroup uint* places,
    uint N,
    uint R,
    uint FOUND,
    uint n,
    uint tid,
    uint threads) {
  for (uint k = 8 * tid; k < R; k += 8 * threads) {
    float4 v[2];
    eight(w1, known[n] * R + k, v);
    device float4* to = (device float4*)(e + n * R + k);
    to[0] = v[0];
    to[1] = v[1];
  }
  if (n + 1 < N) {
    if (tid == 0) {
      tokens[n] = known[n + 1];
    }
    return;
  }
  uint last =
      markov_token(known, found, FOUND, N, values, places, tid, threads);
  if (tid == 0) {
    tokens[n] = last;
  }
}
