// Eight neighbouring values of a row, in memory as floats or halves.

METAL_FUNC void load(const device float* from, thread float* v) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float4 four = ((const device float4*)from)[j];
    v[4 * j] = four.x;
    v[4 * j + 1] = four.y;
    v[4 * j + 2] = four.z;
    v[4 * j + 3] = four.w;
  }
}

METAL_FUNC void load(const device half* from, thread float* v) {
  uint4 four = *(const device uint4*)from;
  uint words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 pair = float2(as_type<half2>(words[j]));
    v[2 * j] = pair.x;
    v[2 * j + 1] = pair.y;
  }
}

METAL_FUNC void store(device float* out, const thread float* v) {
  ((device float4*)out)[0] = float4(v[0], v[1], v[2], v[3]);
  ((device float4*)out)[1] = float4(v[4], v[5], v[6], v[7]);
}

METAL_FUNC void store(device half* out, const thread float* v) {
  uint words[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    words[j] = as_type<uint>(half2(v[2 * j], v[2 * j + 1]));
  }
  *(device uint4*)out = uint4(words[0], words[1], words[2], words[3]);
}
