// The two greatest values of a set, and where the greatest lies: of equals the
// lowest id comes first.
struct top {
  float first;
  float second;
  uint id;
};

METAL_FUNC top none() { return {-INFINITY, -INFINITY, 0xffffffff}; }

// A NaN never wins.
METAL_FUNC top of(float value, uint id) {
  return {max(value, -INFINITY), -INFINITY, id};
}

METAL_FUNC top better(top a, top b) {
  bool ahead = a.first > b.first || (a.first == b.first && a.id < b.id);
  float loser = ahead ? b.first : a.first;
  float second = max(loser, max(a.second, b.second));
  return {ahead ? a.first : b.first, second, ahead ? a.id : b.id};
}

// Of the simdgroup's, in every lane.
METAL_FUNC top best(top t) {
  for (ushort apart = 16; apart > 0; apart /= 2) {
    float first = simd_shuffle_xor(t.first, apart);
    float second = simd_shuffle_xor(t.second, apart);
    t = better(t, {first, second, simd_shuffle_xor(t.id, apart)});
  }
  return t;
}

// Of the threadgroup's, in every thread.
METAL_FUNC top best(
    top t,
    threadgroup float2* values,  // of the simdgroups
    threadgroup uint* places,
    uint tid,
    uint threads) {
  t = best(t);
  if (tid % 32 == 0) {
    values[tid / 32] = float2(t.first, t.second);
    places[tid / 32] = t.id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint s = tid % 32;
  t = none();
  if (s < threads / 32) {
    t = {values[s].x, values[s].y, places[s]};
  }
  return best(t);
}
