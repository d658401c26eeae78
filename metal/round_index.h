// Walsh-Hadamard of a row in Sylvester order times DI^(-1/2), then e2m1 in
// blocks of 32 channels: values 0, .5, 1, 1.5, 2, 3, 4 and 6, ties to the even
// code, times the least power of two at or above max |x| / 6 of the block.
//
// A simdgroup holds a row, lane l its channels C l .. C l + C - 1.

METAL_FUNC float round_e2m1(float x) {
  float size = min(fabs(x), 6.0f);
  float step = size < 2 ? 0.5f : size < 4 ? 1.0f : 2.0f;
  float steps = size < 2 ? 2.0f : size < 4 ? 1.0f : 0.5f;
  return copysign(rint(size * steps) * step, x);
}

template <int C>  // DI / 32: 1, 2, 4 or 8
METAL_FUNC void round_index(thread float* v, uint lane) {
  for (int apart = 1; apart < C; apart *= 2) {
    for (int i = 0; i < C; i++) {
      if (!(i & apart)) {
        float low = v[i];
        v[i] = low + v[i + apart];
        v[i + apart] = low - v[i + apart];
      }
    }
  }
  for (ushort apart = 1; apart < 32; apart *= 2) {
    float sign = lane & apart ? -1 : 1;
    for (int i = 0; i < C; i++) {
      float other = simd_shuffle_xor(v[i], apart);
      v[i] = fma(v[i], sign, other);
    }
  }

  // DI^(-1/2), which a GPU's own root may miss by a bit.
  constexpr float FACTOR = C == 1   ? 0.17677669529663687f
                           : C == 2 ? 0.125f
                           : C == 4 ? 0.08838834764831845f
                                    : 0.0625f;
  float largest = 7.052966104933725e-38f;  // 6 * 2^-126
  for (int i = 0; i < C; i++) {
    v[i] *= FACTOR;
    largest = max(largest, fabs(v[i]));
  }
  for (ushort apart = 1; apart < 32 / C; apart *= 2) {
    largest = max(largest, simd_shuffle_xor(largest, apart));
  }
  uint bits = as_type<uint>(largest * (1.0f / 6));
  uint exponent = (bits + 0x7fffff) >> 23;
  float scale = as_type<float>(exponent << 23);
  float inverse = as_type<float>((254 - exponent) << 23);
  for (int i = 0; i < C; i++) {
    v[i] = round_e2m1(v[i] * inverse) * scale;
  }
}
