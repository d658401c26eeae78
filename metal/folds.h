// Sums of several values over lanes, in few shuffles.

// Of each LANES lanes, lane l receives the sum of v[l * WIDTH / LANES], over
// lanes LANES / 2 apart first. WIDTH is at most LANES. v is lost.
template <int WIDTH, int LANES>
METAL_FUNC float folds(thread float* v, uint lane) {
#pragma unroll
  for (int apart = LANES / 2; apart > 0; apart /= 2) {
    int kept = WIDTH * apart / LANES;
    if (kept == 0) {
      v[0] += simd_shuffle_xor(v[0], apart);
    }
    // Each of two lanes goes on with the half of the values that it keeps.
    bool upper = lane & apart;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
      if (i < kept) {
        float given = upper ? v[i] : v[i + kept];
        v[i] = (upper ? v[i + kept] : v[i]) + simd_shuffle_xor(given, apart);
      }
    }
  }
  return v[0];
}
