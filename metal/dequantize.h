// Weights as values. A matrix is a struct of its planes, laid out as by
// convert/repack.py, and a reader takes neighbouring columns of a row:
//
// fetch<Q>(w, i, raw)  loads the words of Q quads of columns, from element i on
// octet(w, raw, o, v)  makes the eight codes of the o-th octet exact floats
// scaling(w, i)        gives scale and minimum of the GROUP octets from i on
//
// and a weight is code * scale - minimum. i counts elements of the whole
// matrix, past 2^32 for none of Flash's, and is a multiple of 4 QUADS. Q is
// QUADS or 8. Types without MINIMA have a minimum of 0. read(w, i, v) gives the
// QUADS vectors from i on, exact or (with MINIMA) rounded once.

template <int N>
METAL_FUNC void load(const device uint* from, thread uint* to) {
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    if (N % 4 == 0) {
      uint4 words = ((const device uint4*)from)[j / 4];
      to[j] = words.x;
      to[j + 1] = words.y;
      to[j + 2] = words.z;
      to[j + 3] = words.w;
    } else if (N % 2 == 0) {
      uint2 words = *(const device uint2*)from;
      to[0] = words.x;
      to[1] = words.y;
    } else {
      to[0] = *from;
    }
  }
}

// The codes j and j + 4 of an octet, in the halves of `bits`, as floats. A code
// in the low bits of a half is a subnormal, 2^-24 of its value: scales make up.
METAL_FUNC void halves(uint bits, int j, thread float* v) {
  float2 pair = float2(as_type<half2>(bits));
  v[j] = pair.x;
  v[j + 4] = pair.y;
}

// F32, F16 and BF16.
template <typename T>
struct dense {
  enum { WORDS = 2 * sizeof(T), QUADS = 2, GROUP = 4, MINIMA = 0 };
  const device T* data;
};

template <int Q, typename T>
METAL_FUNC void fetch(dense<T> w, uint i, thread uint* raw) {
  load<Q * dense<T>::WORDS / 2>((const device uint*)(w.data + i), raw);
}

METAL_FUNC void octet(
    dense<float> w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[j] = as_type<float>(raw[8 * o + j]);
  }
}

METAL_FUNC void octet(
    dense<half> w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 pair = float2(as_type<half2>(raw[4 * o + j]));
    v[2 * j] = pair.x;
    v[2 * j + 1] = pair.y;
  }
}

METAL_FUNC void octet(
    dense<bfloat> w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    v[2 * j] = as_type<float>(raw[4 * o + j] << 16);
    v[2 * j + 1] = as_type<float>(raw[4 * o + j] & 0xffff0000u);
  }
}

template <typename T>
METAL_FUNC float2 scaling(dense<T> w, uint i) {
  return float2(1, 0);
}

struct q8_0 {
  enum { WORDS = 2, QUADS = 2, GROUP = 4, MINIMA = 0 };
  const device uint* codes;  // + 128
  const device half* scales;
};

METAL_FUNC void octet(q8_0 w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float4 codes = float4(as_type<uchar4>(raw[2 * o + j])) - 128.0f;
    v[4 * j] = codes.x;
    v[4 * j + 1] = codes.y;
    v[4 * j + 2] = codes.z;
    v[4 * j + 3] = codes.w;
  }
}

METAL_FUNC float2 scaling(q8_0 w, uint i) {
  return float2(w.scales[i / 32], 0);
}

// Eight codes of four bits, in sequence from the low bits up.
METAL_FUNC void nibbles(uint word, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    halves(word >> 4 * j & 0x000f000fu, j, v);
  }
}

struct q4_0 {
  enum { WORDS = 1, QUADS = 2, GROUP = 4, MINIMA = 1 };
  const device uint* codes;
  const device half* scales;
};

METAL_FUNC void octet(q4_0 w, const thread uint* raw, int o, thread float* v) {
  nibbles(raw[o], v);
}

METAL_FUNC float2 scaling(q4_0 w, uint i) {
  return float(w.scales[i / 32]) * float2(16777216.0f, 8);
}

// Codes are e2m1 floats; a scale is the exponent byte of a float.
struct mxfp4 {
  enum { WORDS = 1, QUADS = 2, GROUP = 4, MINIMA = 0 };
  const device uint* codes;
  const device uchar* scales;
};

// A code moved to sign, exponent and mantissa of a half is 2^-14 of its value.
METAL_FUNC void octet(mxfp4 w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint size = j < 3 ? raw[o] << (9 - 4 * j) : raw[o] >> 3;
    uint sign = raw[o] << (12 - 4 * j);
    halves((size & 0x0e000e00u) | (sign & 0x80008000u), j, v);
  }
}

METAL_FUNC float2 scaling(mxfp4 w, uint i) {
  // Scales of 2^114 and above become infinite.
  uint exponent = min(uint(w.scales[i / 32]) + 14, 255u);
  return float2(as_type<float>(exponent << 23), 0);
}

// Of Q4_K and Q5_K, `codes` are 2^-24 of their values.
METAL_FUNC float2
k_scaling(const device uchar* scales, const device half* d, uint i) {
  uint j = i / 32 % 8;
  scales += i / 256 * 12;
  uint low = scales[j % 4];
  uint middle = scales[4 + j % 4];
  uint high = scales[8 + j % 4];
  uint scale = j < 4 ? low & 63 : (high & 15) | low >> 6 << 4;
  uint minimum = j < 4 ? middle & 63 : high >> 4 | middle >> 6 << 4;
  float2 both = float2(as_type<half2>(((const device uint*)d)[i / 256]));
  return both * float2(scale, minimum) * float2(16777216.0f, 1);
}

struct q4_k {
  enum { WORDS = 1, QUADS = 2, GROUP = 4, MINIMA = 1 };
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

METAL_FUNC void octet(q4_k w, const thread uint* raw, int o, thread float* v) {
  nibbles(raw[o], v);
}

METAL_FUNC float2 scaling(q4_k w, uint i) {
  return k_scaling(w.scales, w.d, i);
}

struct q5_k {
  enum { WORDS = 1, QUADS = 8, GROUP = 4, MINIMA = 1 };
  const device uint* codes;
  const device uint* high;
  const device uchar* scales;
  const device half* d;
};

template <int Q>
METAL_FUNC void fetch(q5_k w, uint i, thread uint* raw) {
  load<Q / 2>(w.codes + i / 8, raw);
  load<Q / 8>(w.high + i / 32, raw + Q / 2);
}

METAL_FUNC void octet(q5_k w, const thread uint* raw, int o, thread float* v) {
  uint high = raw[4] >> 8 * o & 255;
  high |= high << 12;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint low = raw[o] >> 4 * j & 0x000f000fu;
    halves(low | (high >> j & 0x00010001u) << 4, j, v);
  }
}

METAL_FUNC float2 scaling(q5_k w, uint i) {
  return k_scaling(w.scales, w.d, i);
}

struct q6_k {
  enum { WORDS = 1, QUADS = 4, GROUP = 2, MINIMA = 1 };
  const device uint* codes;
  const device uint* high;
  const device int8_t* scales;
  const device half* d;
};

template <int Q>
METAL_FUNC void fetch(q6_k w, uint i, thread uint* raw) {
  load<Q / 4>(w.high + i / 16, raw);
  load<Q / 2>(w.codes + i / 8, raw + 2);
}

METAL_FUNC void octet(q6_k w, const thread uint* raw, int o, thread float* v) {
  uint high = raw[o / 2] >> 16 * (o % 2) & 0xffff;
  high |= high << 8;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint low = raw[2 + o] >> 4 * j & 0x000f000fu;
    halves(low | (high >> 2 * j & 0x00030003u) << 4, j, v);
  }
}

METAL_FUNC float2 scaling(q6_k w, uint i) {
  return float(w.d[i / 256]) * w.scales[i / 16] * float2(16777216.0f, 32);
}

struct q2_k {
  enum { WORDS = 1, QUADS = 4, GROUP = 2, MINIMA = 1 };
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

template <int Q>
METAL_FUNC void fetch(q2_k w, uint i, thread uint* raw) {
  load<Q / 4>(w.codes + i / 16, raw);
}

METAL_FUNC void octet(q2_k w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    // The codes j of two octets are halves of one word.
    half2 pair = as_type<half2>(raw[o / 2] >> 2 * j & 0x00030003u);
    v[j] = pair[o % 2];
  }
}

METAL_FUNC float2 scaling(q2_k w, uint i) {
  uint both = w.scales[i / 16];
  float2 d = float2(as_type<half2>(((const device uint*)w.d)[i / 256]));
  return d * float2(both & 15, both >> 4) * float2(16777216.0f, 1);
}

struct iq2_xxs {
  enum { WORDS = 0, QUADS = 8, GROUP = 4, MINIMA = 0 };
  const device uchar* grid;  // a code for an octet
  const device uint* signs;
  const device half* d;
  const threadgroup uint2* table;  // magnitudes by code: bytes 0145 and 2367
};

template <int Q>
METAL_FUNC void fetch(iq2_xxs w, uint i, thread uint* raw) {
  load<1>((const device uint*)(w.grid + i / 8), raw);
  load<1>(w.signs + i / 32, raw + 1);
}

METAL_FUNC void octet(
    iq2_xxs w, const thread uint* raw, int o, thread float* v) {
  uint2 bytes = w.table[raw[0] >> 8 * o & 255];
  // Seven signs, and an eighth that makes the number of set bits even.
  uint signs = raw[1] >> 7 * o & 127;
  signs = signs * 0x1001 + (popcount(signs) << 19);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint size = (j % 2 ? bytes[j / 2] >> 8 : bytes[j / 2]) & 0x00ff00ffu;
    halves(size ^ (signs << (15 - j) & 0x80008000u), j, v);
  }
}

METAL_FUNC float2 scaling(iq2_xxs w, uint i) {
  float scale = 0.125f + 0.25f * float(w.signs[i / 32] >> 28);
  return float2(float(w.d[i / 256]) * scale * 16777216.0f, 0);
}

template <int Q, typename W>
METAL_FUNC void fetch(W w, uint i, thread uint* raw) {
  load<Q * W::WORDS / 2>(w.codes + i / (8 / W::WORDS), raw);
}

template <typename W>
METAL_FUNC void read(W w, uint i, thread float4* v) {
  uint raw[4 * W::QUADS];
  fetch<W::QUADS>(w, i, raw);
  float2 scale = scaling(w, i);
#pragma unroll
  for (int q = 0; q < W::QUADS; q++) {
    float codes[8];
    octet(w, raw, q / 2, codes);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float code = codes[q % 2 * 4 + c];
      v[q][c] = W::MINIMA ? fma(code, scale.x, -scale.y) : code * scale.x;
    }
  }
}
