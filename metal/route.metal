// The router: from the gate's logits [N, E] to a token's experts and weights,
//   score = sqrt(softplus(logit)), weight = score / sum of the chosen * scale.
//
// Grid (threads of one threadgroup, N): a threadgroup owns a token. All float;
// the chosen scores are summed in the order of their places.
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

// The K largest of score + bias: an expert's place is how many precede it, a
// tie goes to the lowest expert.
template <typename L, typename B>
METAL_FUNC void route_best(
    L logits,
    B bias,                     // [E]
    device uint* ids,           // [N, K], best first
    device float* weights,      // [N, K]
    threadgroup float* keys,    // [E]
    threadgroup float* chosen,  // [K]
    float scale,
    uint E,
    uint K,
    uint n,
    uint tid,
    uint threads) {
  for (uint e = tid; e < E; e += threads) {
    // A NaN would give two experts one place, and leave another empty.
    keys[e] = max(route_score(logits[n * E + e]) + bias[e], -INFINITY);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = tid; e < E; e += threads) {
    float key = keys[e];
    uint place = 0;
    for (uint other = 0; other < E; other++) {
      place += keys[other] > key || (keys[other] == key && other < e);
    }
    if (place < K) {
      ids[n * K + place] = e;
      chosen[place] = route_score(logits[n * E + e]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < K) {
    weights[n * K + tid] = route_weight(chosen, tid, K, scale);
  }
}

// The experts of a hash layer are known.
template <typename L, typename I>
METAL_FUNC void route_listed(
    L logits,
    I ids,                      // [N, K]
    device float* weights,      // [N, K]
    threadgroup float* chosen,  // [K]
    float scale,
    uint E,
    uint K,
    uint n,
    uint tid) {
  if (tid < K) {
    chosen[tid] = route_score(logits[n * E + ids[n * K + tid]]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < K) {
    weights[n * K + tid] = route_weight(chosen, tid, K, scale);
  }
}
