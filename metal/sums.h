// Sums of several values over the lanes of a simdgroup.

// Lane l receives the sum of v[l % WIDTH], over lanes 16, 8, 4, 2 and 1 apart,
// which is one order of summation for every WIDTH. v is lost.
template <int WIDTH>
METAL_FUNC float lane_sums(thread float* v, uint lane) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
#pragma unroll
    for (int i = 0; i < min(apart, WIDTH); i++) {
      if (apart >= WIDTH) {
        v[i] += simd_shuffle_xor(v[i], apart);
      } else {
        // Each of two lanes goes on with the half of the values that it keeps.
        bool upper = lane & apart;
        float given = upper ? v[i] : v[i + apart];
        v[i] = (upper ? v[i + apart] : v[i]) + simd_shuffle_xor(given, apart);
      }
    }
  }
  return v[0];
}
