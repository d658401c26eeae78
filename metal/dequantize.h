// Weights as values. A matrix is a struct of its planes, laid out as by
// convert/repack.py, and read(w, i, v) writes elements i, i + 1 ... of it to
// the QUADS vectors v. i counts elements of the whole matrix, past 2^32 for
// none of Flash's, and is a multiple of 4 QUADS. Values are exact, but rounded
// once for Q5_K, Q6_K and the types with minima.

// F32, F16 and BF16.
template <typename T>
struct dense {
  enum { QUADS = 4 / sizeof(T) };
  const device T* data;
};

METAL_FUNC void read(dense<float> w, uint i, thread float4* v) {
  v[0] = ((const device float4*)w.data)[i / 4];
}

METAL_FUNC void read(dense<half> w, uint i, thread float4* v) {
  uint4 words = ((const device uint4*)w.data)[i / 8];
  v[0] = float4(half4(as_type<half2>(words.x), as_type<half2>(words.y)));
  v[1] = float4(half4(as_type<half2>(words.z), as_type<half2>(words.w)));
}

METAL_FUNC void read(dense<bfloat> w, uint i, thread float4* v) {
  uint4 words = ((const device uint4*)w.data)[i / 8];
  float4 even = as_type<float4>(words << 16);
  float4 odd = as_type<float4>(words & 0xffff0000);
  v[0] = float4(even.x, odd.x, even.y, odd.y);
  v[1] = float4(even.z, odd.z, even.w, odd.w);
}

struct q8_0 {
  enum { QUADS = 2 };
  const device uint* codes;
  const device half* scales;
};

METAL_FUNC void read(q8_0 w, uint i, thread float4* v) {
  uint2 words = ((const device uint2*)w.codes)[i / 8];
  float scale = w.scales[i / 32];
  v[0] = scale * (float4(as_type<uchar4>(words.x)) - 128.0f);
  v[1] = scale * (float4(as_type<uchar4>(words.y)) - 128.0f);
}

// Eight codes of four bits, in sequence from the low bits up.
METAL_FUNC void nibbles(uint word, thread float4* v) {
  float4 even = float4(as_type<uchar4>(word & 0x0f0f0f0f));
  float4 odd = float4(as_type<uchar4>(word >> 4 & 0x0f0f0f0f));
  v[0] = float4(even.x, odd.x, even.y, odd.y);
  v[1] = float4(even.z, odd.z, even.w, odd.w);
}

struct q4_0 {
  enum { QUADS = 2 };
  const device uint* codes;
  const device half* scales;
};

METAL_FUNC void read(q4_0 w, uint i, thread float4* v) {
  nibbles(w.codes[i / 8], v);
  float scale = w.scales[i / 32];
  v[0] = scale * (v[0] - 8.0f);
  v[1] = scale * (v[1] - 8.0f);
}

// Codes are e2m1 floats; a scale is the exponent byte of a float.
struct mxfp4 {
  enum { QUADS = 2 };
  const device uint* codes;
  const device uchar* scales;
};

METAL_FUNC void read(mxfp4 w, uint i, thread float4* v) {
  uint word = w.codes[i / 8];
  uint exponent = w.scales[i / 32];
  // A code in the top exponent and mantissa bits of a half is 2^-14 too small.
  float scale = 16384 * as_type<float>(exponent ? exponent << 23 : 0x400000);
  for (int j = 0; j < 4; j++, word >>= 4) {
    half2 pair =
        as_type<half2>((word & 0x00080008) << 12 | (word & 0x00070007) << 9);
    v[0][j] = scale * float(pair.x);
    v[1][j] = scale * float(pair.y);
  }
}

// Of Q4_K and Q5_K: scale and minimum of the 32 elements from i on.
METAL_FUNC float2
k_scale(const device uchar* scales, const device half* d, uint i) {
  uint block = i / 256;
  uint j = i / 32 % 8;
  scales += 12 * block;
  uint low = scales[j % 4];
  uint middle = scales[4 + j % 4];
  uint high = scales[8 + j % 4];
  uint scale = j < 4 ? low & 63 : (high & 15) | low >> 6 << 4;
  uint minimum = j < 4 ? middle & 63 : high >> 4 | middle >> 6 << 4;
  return float2(d[2 * block], d[2 * block + 1]) * float2(scale, minimum);
}

struct q4_k {
  enum { QUADS = 2 };
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

METAL_FUNC void read(q4_k w, uint i, thread float4* v) {
  float2 scale = k_scale(w.scales, w.d, i);
  nibbles(w.codes[i / 8], v);
  v[0] = fma(v[0], scale.x, -scale.y);
  v[1] = fma(v[1], scale.x, -scale.y);
}

struct q5_k {
  enum { QUADS = 2 };
  const device uint* codes;
  const device uint* high;
  const device uchar* scales;
  const device half* d;
};

METAL_FUNC void read(q5_k w, uint i, thread float4* v) {
  float2 scale = k_scale(w.scales, w.d, i);
  nibbles(w.codes[i / 8], v);
  uint high = w.high[i / 32] >> i % 32;
  for (int j = 0; j < 8; j++) {
    float code = v[j / 4][j % 4] + 16 * (high >> j & 1);
    v[j / 4][j % 4] = fma(code, scale.x, -scale.y);
  }
}

struct q6_k {
  enum { QUADS = 2 };
  const device uint* codes;
  const device uint* high;
  const device int8_t* scales;
  const device half* d;
};

METAL_FUNC void read(q6_k w, uint i, thread float4* v) {
  float scale = float(w.d[i / 256]) * w.scales[i / 16];
  nibbles(w.codes[i / 8], v);
  uint high = w.high[i / 16] >> 2 * (i % 16);
  for (int j = 0; j < 8; j++) {
    float code = v[j / 4][j % 4] + 16 * (high >> 2 * j & 3);
    v[j / 4][j % 4] = scale * (code - 32);
  }
}

struct q2_k {
  enum { QUADS = 4 };
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

METAL_FUNC void read(q2_k w, uint i, thread float4* v) {
  uint word = w.codes[i / 16];
  uint packed = w.scales[i / 16];
  float scale = float(w.d[i / 256 * 2]) * (packed & 15);
  float minimum = float(w.d[i / 256 * 2 + 1]) * (packed >> 4);
  for (int j = 0; j < 4; j++, word >>= 2) {
    float4 codes = float4(as_type<uchar4>(word & 0x03030303));
    for (int k = 0; k < 4; k++) {
      v[k][j] = fma(codes[k], scale, -minimum);
    }
  }
}

// Magnitudes of 8 elements, a byte each, for a byte of the grid plane.
constant ulong iq2_xxs_grid[256] = {
    0x0808080808080808, 0x080808080808082b, 0x0808080808081919,
    0x0808080808082b08, 0x0808080808082b2b, 0x0808080808190819,
    0x0808080808191908, 0x08080808082b0808, 0x08080808082b082b,
    0x08080808082b2b08, 0x08080808082b2b2b, 0x0808080819080819,
    0x0808080819081908, 0x0808080819190808, 0x0808080819192b08,
    0x08080808192b0819, 0x08080808192b1908, 0x080808082b080808,
    0x080808082b08082b, 0x080808082b082b2b, 0x080808082b2b082b,
    0x0808081908080819, 0x0808081908081908, 0x0808081908190808,
    0x0808081908191919, 0x0808081919080808, 0x080808192b081908,
    0x080808192b192b08, 0x0808082b08080808, 0x0808082b0808082b,
    0x0808082b082b082b, 0x0808082b2b08082b, 0x0808190808080819,
    0x0808190808081908, 0x0808190808190808, 0x08081908082b0819,
    0x08081908082b1908, 0x0808190819080808, 0x080819081908082b,
    0x0808190819082b08, 0x08081908192b0808, 0x080819082b080819,
    0x080819082b081908, 0x080819082b190808, 0x080819082b2b1908,
    0x0808191908080808, 0x080819190808082b, 0x0808191908082b08,
    0x08081919082b0808, 0x080819191908192b, 0x08081919192b2b19,
    0x080819192b080808, 0x080819192b190819, 0x0808192b08082b19,
    0x0808192b08190808, 0x0808192b19080808, 0x0808192b2b081908,
    0x0808192b2b2b1908, 0x08082b0808080808, 0x08082b0808081919,
    0x08082b0808082b08, 0x08082b0808191908, 0x08082b08082b2b08,
    0x08082b0819080819, 0x08082b0819081908, 0x08082b0819190808,
    0x08082b081919082b, 0x08082b082b082b08, 0x08082b1908081908,
    0x08082b1919080808, 0x08082b2b0808082b, 0x08082b2b08191908,
    0x0819080808080819, 0x0819080808081908, 0x0819080808190808,
    0x08190808082b0819, 0x0819080819080808, 0x08190808192b0808,
    0x081908082b081908, 0x081908082b190808, 0x081908082b191919,
    0x0819081908080808, 0x0819081908082b08, 0x08190819082b0808,
    0x0819081919190808, 0x0819081919192b2b, 0x081908192b080808,
    0x0819082b082b1908, 0x0819082b19081919, 0x0819190808080808,
    0x0819190808082b08, 0x08191908082b0808, 0x08191908082b1919,
    0x0819190819082b19, 0x081919082b080808, 0x0819191908192b08,
    0x08191919192b082b, 0x0819192b08080808, 0x0819192b0819192b,
    0x08192b0808080819, 0x08192b0808081908, 0x08192b0808190808,
    0x08192b0819080808, 0x08192b082b080819, 0x08192b1908080808,
    0x08192b1908081919, 0x08192b192b2b0808, 0x08192b2b19190819,
    0x082b080808080808, 0x082b08080808082b, 0x082b080808082b2b,
    0x082b080819081908, 0x082b0808192b0819, 0x082b08082b080808,
    0x082b08082b08082b, 0x082b0819082b2b19, 0x082b081919082b08,
    0x082b082b08080808, 0x082b082b0808082b, 0x082b190808080819,
    0x082b190808081908, 0x082b190808190808, 0x082b190819080808,
    0x082b19081919192b, 0x082b191908080808, 0x082b191919080819,
    0x082b1919192b1908, 0x082b192b2b190808, 0x082b2b0808082b08,
    0x082b2b08082b0808, 0x082b2b082b191908, 0x082b2b2b19081908,
    0x1908080808080819, 0x1908080808081908, 0x1908080808190808,
    0x1908080808192b08, 0x19080808082b0819, 0x19080808082b1908,
    0x1908080819080808, 0x1908080819082b08, 0x190808081919192b,
    0x19080808192b0808, 0x190808082b080819, 0x190808082b081908,
    0x190808082b190808, 0x1908081908080808, 0x19080819082b0808,
    0x19080819192b0819, 0x190808192b080808, 0x190808192b081919,
    0x1908082b08080819, 0x1908082b08190808, 0x1908082b19082b08,
    0x1908082b1919192b, 0x1908082b192b2b08, 0x1908190808080808,
    0x1908190808082b08, 0x19081908082b0808, 0x190819082b080808,
    0x190819082b192b19, 0x190819190819082b, 0x19081919082b1908,
    0x1908192b08080808, 0x19082b0808080819, 0x19082b0808081908,
    0x19082b0808190808, 0x19082b0819080808, 0x19082b0819081919,
    0x19082b1908080808, 0x19082b1919192b08, 0x19082b19192b0819,
    0x19082b192b08082b, 0x19082b2b19081919, 0x19082b2b2b190808,
    0x1919080808080808, 0x1919080808082b08, 0x1919080808190819,
    0x1919080808192b19, 0x19190808082b0808, 0x191908082b080808,
    0x191908082b082b08, 0x1919081908081908, 0x191908191908082b,
    0x191908192b2b1908, 0x1919082b2b190819, 0x191919082b190808,
    0x191919082b19082b, 0x1919191908082b2b, 0x1919192b08080819,
    0x1919192b19191908, 0x19192b0808080808, 0x19192b0808190819,
    0x19192b0808192b19, 0x19192b08192b1908, 0x19192b1919080808,
    0x19192b2b08082b08, 0x192b080808081908, 0x192b080808190808,
    0x192b080819080808, 0x192b0808192b2b08, 0x192b081908080808,
    0x192b081919191919, 0x192b082b08192b08, 0x192b082b192b0808,
    0x192b190808080808, 0x192b190808081919, 0x192b191908190808,
    0x192b19190819082b, 0x192b19192b081908, 0x192b2b081908082b,
    0x2b08080808080808, 0x2b0808080808082b, 0x2b08080808082b2b,
    0x2b08080819080819, 0x2b0808082b08082b, 0x2b08081908081908,
    0x2b08081908192b08, 0x2b08081919080808, 0x2b08082b08190819,
    0x2b08190808080819, 0x2b08190808081908, 0x2b08190808190808,
    0x2b08190808191919, 0x2b08190819080808, 0x2b081908192b0808,
    0x2b08191908080808, 0x2b0819191908192b, 0x2b0819192b191908,
    0x2b08192b08082b19, 0x2b08192b19080808, 0x2b08192b192b0808,
    0x2b082b080808082b, 0x2b082b1908081908, 0x2b082b2b08190819,
    0x2b19080808081908, 0x2b19080808190808, 0x2b190808082b1908,
    0x2b19080819080808, 0x2b1908082b2b0819, 0x2b1908190819192b,
    0x2b1908192b080808, 0x2b19082b19081919, 0x2b19190808080808,
    0x2b191908082b082b, 0x2b19190819081908, 0x2b19191919190819,
    0x2b192b082b080819, 0x2b192b19082b0808, 0x2b2b08080808082b,
    0x2b2b080819190808, 0x2b2b08082b081919, 0x2b2b081908082b19,
    0x2b2b082b08080808, 0x2b2b190808192b08, 0x2b2b2b0819190808,
    0x2b2b2b1908081908};

struct iq2_xxs {
  enum { QUADS = 2 };
  const device uchar* grid;
  const device uint* signs;
  const device half* d;
};

METAL_FUNC void read(iq2_xxs w, uint i, thread float4* v) {
  uint packed = w.signs[i / 32];
  float scale = float(w.d[i / 256]) * (0.5f + (packed >> 28)) * 0.25f;
  // Seven signs, and an eighth that makes the number of set bits even.
  uint signs = packed >> 7 * (i / 8 % 4) & 127;
  signs |= (popcount(signs) & 1) << 7;
  uint2 bytes = as_type<uint2>(iq2_xxs_grid[w.grid[i / 8]]);
  v[0] = scale * float4(as_type<uchar4>(bytes.x));
  v[1] = scale * float4(as_type<uchar4>(bytes.y));
  for (int j = 0; j < 8; j++) {
    float value = v[j / 4][j % 4];
    v[j / 4][j % 4] = signs >> j & 1 ? -value : value;
  }
}
