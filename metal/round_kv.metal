// The fp8 round trip of keys and values: the first QUANTISED channels of a row,
// in blocks of 64, become e4m3 times a power of two; the others are copied.
// The scale is the least power of two at or above max |x| / 448, |x| >= 1e-4;
// e4m3 rounds to nearest, ties to even, and holds no value above 448.
//
// Grid (32 * simdgroups, N): a simdgroup owns 64 channels, a lane two of them.
METAL_FUNC float round_e4m3(float x) {
  if (fabs(x) < 1.0f / 64) {  // subnormal: multiples of 2^-9
    return copysign(rint(fabs(x) * 512) / 512, x);
  }
  uint bits = as_type<uint>(x);
  bits += 0x7ffff + ((bits >> 20) & 1);
  return as_type<float>(bits & 0xfff00000);
}

// A block of 64 channels, two in a lane.
METAL_FUNC float2 round_block(float2 value) {
  float largest = simd_max(max(fabs(value.x), fabs(value.y)));
  uint bits = as_type<uint>(max(largest, 1e-4f) * (1.0f / 448));
  float scale = as_type<float>((bits + 0x7fffff) >> 23 << 23);
  value = clamp(value / scale, -448.0f, 448.0f);
  return float2(round_e4m3(value.x), round_e4m3(value.y)) * scale;
}

METAL_FUNC void round_kv(
    const device float* x,  // [N, DH]
    device float* out,      // [N, DH]
    uint DH,
    uint QUANTISED,
    uint block,
    uint n,
    uint lane) {
  uint first = block * 64 + lane;
  if (block * 64 >= QUANTISED) {
    for (uint d = first; d < min(DH, block * 64 + 64); d += 32) {
      out[n * DH + d] = x[n * DH + d];
    }
    return;
  }
  float2 value = float2(x[n * DH + first], x[n * DH + first + 32]);
  value = round_block(value);
  out[n * DH + first] = value.x;
  out[n * DH + first + 32] = value.y;
}
