// The router: from the gate's logits [N, E] to a token's experts and weights,
//   score = sqrt(softplus(logit)), weight = score / sum of the chosen * scale.
//
// Grid (threads of one threadgroup, N): a threadgroup owns a token. All float;
// the chosen scores are summed in the order of their places. Of more experts
// than are wanted those with the largest score + bias are chosen, a tie goes to
// the lowest expert, and a NaN counts as minus infinity.
METAL_FUNC float route_score(float logit) {
  // log(1 + e), with the rounding of 1 + e corrected: a small e is kept.
  float e = exp(-fabs(logit));
  float rounded = 1 + e;
  float small = rounded == 1 ? e : log(rounded) * e / (rounded - 1);
  return sqrt(max(logit, 0.0f) + small);
}

METAL_FUNC float route_weight(
    const threadgroup float* chosen, uint k, uint K, float scale) {
  float total = 0;
  for (uint i = 0; i < K; i++) {
    total += chosen[i];
  }
  return chosen[k] / max(total, 1e-20f) * scale;
}

template <typename L, typename B>
METAL_FUNC void route_keys(
    L logits,  // [E] of a token
    B bias,    // [E]
    threadgroup float* keys,
    uint E,
    uint tid,
    uint threads) {
  for (uint e = tid; e < E; e += threads) {
    // A NaN would give two experts one place, and leave another empty.
    keys[e] = max(route_score(logits[e]) + bias[e], -INFINITY);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// An expert's place is how many precede it.
template <typename L, typename B>
METAL_FUNC void route_best(
    L logits,                   // [E] of a token
    B bias,                     // [E]
    device uint* ids,           // [K], best first
    device float* weights,      // [K]
    threadgroup float* keys,    // [E]
    threadgroup float* chosen,  // [K]
    float scale,
    uint E,
    uint K,
    uint tid,
    uint threads) {
  route_keys(logits, bias, keys, E, tid, threads);
  for (uint e = tid; e < E; e += threads) {
    float key = keys[e];
    uint place = 0;
    for (uint other = 0; other < E; other++) {
      place += keys[other] > key || (keys[other] == key && other < e);
    }
    if (place < K) {
      ids[place] = e;
      chosen[place] = route_score(logits[e]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < K) {
    weights[tid] = route_weight(chosen, tid, K, scale);
  }
}

// The experts of a hash layer are known.
template <typename L, typename I>
METAL_FUNC void route_listed(
    L logits,                   // [E] of a token
    I ids,                      // [K]
    device float* weights,      // [K]
    threadgroup float* chosen,  // [K]
    float scale,
    uint E,
    uint K,
    uint tid) {
  if (tid < K) {
    chosen[tid] = route_score(logits[ids[tid]]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < K) {
    weights[tid] = route_weight(chosen, tid, K, scale);
  }
}

// For each threadgroup that wants a token's choice for itself: one simdgroup
// takes the best K times.
template <int E, int K, typename L, typename B>
METAL_FUNC void route_choose(
    L logits,                   // [E] of the token
    B bias,                     // [E]
    threadgroup float* keys,    // [E]
    threadgroup float* chosen,  // [K], scores
    threadgroup uint* ids,      // [K], best first
    uint tid,
    uint threads,
    uint sg,
    uint lane) {
  route_keys(logits, bias, keys, E, tid, threads);
  if (sg == 0) {
    constexpr uint J = (E + 31) / 32;
    float key[J];
    uint taken = 0;  // bits of the lane's experts
#pragma unroll
    for (uint j = 0; j < J; j++) {
      uint e = 32 * j + lane;
      key[j] = keys[min(e, E - 1u)];
      taken |= e < E ? 0 : 1u << j;
    }
    uint own = 0;  // the lane's place
    for (uint k = 0; k < K; k++) {
      float best = -INFINITY;
      uint first = E;
#pragma unroll
      for (uint j = 0; j < J; j++) {
        bool better = first == E || key[j] > best;
        if (!(taken >> j & 1) && better) {
          best = key[j];
          first = 32 * j + lane;
        }
      }
      float top = simd_max(best);
      uint e = simd_min(best == top ? first : uint(E));
      taken |= e % 32 == lane ? 1u << e / 32 : 0;
      own = k == lane ? e : own;
    }
    if (lane < K) {
      ids[lane] = own;
      chosen[lane] = route_score(logits[own]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <int E, int K, typename L, typename I>
METAL_FUNC void route_look(
    L logits,                   // [E] of a token
    I listed,                   // [K] of it
    threadgroup float* chosen,  // [K], scores
    threadgroup uint* ids,      // [K]
    uint tid) {
  if (tid < K) {
    ids[tid] = listed[tid];
    chosen[tid] = route_score(logits[listed[tid]]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
