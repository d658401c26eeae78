// Sums of several values over the lanes of a simdgroup.

// Lanes a multiple of SETS apart are a set. Its lane l * SETS + ... receives
// the sum of the set's v[l % WIDTH], over lanes 16, 8, ... and SETS apart,
// which is one order of summation for every WIDTH. v is lost.
template <int WIDTH, int SETS = 1>
METAL_FUNC float lane_sums(thread float* v, uint lane) {
#pragma unroll
  for (int apart = 16; apart >= SETS; apart /= 2) {
    int kept = apart / SETS;
#pragma unroll
    for (int i = 0; i < min(kept, WIDTH); i++) {
      if (kept >= WIDTH) {
        v[i] += simd_shuffle_xor(v[i], apart);
      } else {
        // Each of two lanes goes on with the half of the values that it keeps.
        bool upper = lane & apart;
        float given = upper ? v[i] : v[i + kept];
        v[i] = (upper ? v[i + kept] : v[i]) + simd_shuffle_xor(given, apart);
      }
    }
  }
  return v[0];
}
