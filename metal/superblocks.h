// The types of dequantize.h whose blocks are of 256: K-quants and IQ2_XXS.

// Of Q4_K and Q5_K. Codes are 2^-24 of their values.
METAL_FUNC uint2
k_packed(const device uchar* scales, const device half* d, uint i) {
  uint j = i / 32 % 8;
  scales += i / 256 * 12 + j % 4;
  uint bytes = scales[0] | uint(scales[4]) << 8 | uint(scales[8]) << 16;
  return uint2(bytes | j / 4 << 24, ((const device uint*)d)[i / 256]);
}

METAL_FUNC float2 k_scaling(uint2 packed) {
  uint low = packed.x & 255;
  uint middle = packed.x >> 8 & 255;
  uint high = packed.x >> 16 & 255;
  bool upper = packed.x >> 24;
  uint scale = upper ? (high & 15) | low >> 6 << 4 : low & 63;
  uint minimum = upper ? high >> 4 | middle >> 6 << 4 : middle & 63;
  float2 both = float2(as_type<half2>(packed.y));
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

template <>
constexpr METAL_FUNC int lift<q4_k>(int c) {
  return 4 * (c % 2);
}

METAL_FUNC void lifted(q4_k w, const thread uint* raw, int o, thread float* v) {
  lifted_nibbles(raw[o], v);
}

METAL_FUNC uint2 packed(q4_k w, uint i) { return k_packed(w.scales, w.d, i); }

METAL_FUNC float2 scaling(q4_k w, uint2 packed) { return k_scaling(packed); }

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
    halves(low | (high >> j & 0x00010001u) << 4, v[j], v[j + 4]);
  }
}

METAL_FUNC uint2 packed(q5_k w, uint i) { return k_packed(w.scales, w.d, i); }

METAL_FUNC float2 scaling(q5_k w, uint2 packed) { return k_scaling(packed); }

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
    halves(low | (high >> 2 * j & 0x00030003u) << 4, v[j], v[j + 4]);
  }
}

METAL_FUNC uint2 packed(q6_k w, uint i) {
  return uint2(uint(w.scales[i / 16]), as_type<ushort>(w.d[i / 256]));
}

METAL_FUNC float2 scaling(q6_k w, uint2 packed) {
  float d = as_type<half>(ushort(packed.y));
  return d * float(int(packed.x)) * float2(16777216.0f, 32);
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

// Five of the eight codes of a half, where they stand.
template <>
constexpr METAL_FUNC int lift<q2_k>(int c) {
  return 2 * (c % 8 % 5);
}

METAL_FUNC void lifted(q2_k w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    uint word = j < 5 ? raw[o / 2] : raw[o / 2] >> 10;
    half2 pair = as_type<half2>(word & 0x00030003u << 2 * (j % 5));
    v[j] = pair[o % 2];
  }
}

METAL_FUNC uint2 packed(q2_k w, uint i) {
  return uint2(w.scales[i / 16], ((const device uint*)w.d)[i / 256]);
}

METAL_FUNC float2 scaling(q2_k w, uint2 packed) {
  float2 d = float2(as_type<half2>(packed.y)) * float2(16777216.0f, 1);
  return d * float2(packed.x & 15, packed.x >> 4);
}

struct iq2_xxs {
  enum { WORDS = 0, QUADS = 8, GROUP = 4, MINIMA = 0 };
  const device uchar* grid;  // a code for an octet
  const device uint* signs;
  const device half* d;
  const threadgroup uint2* table;  // magnitudes by code: bytes 1230 and 5674
};

template <int Q>
METAL_FUNC void fetch(iq2_xxs w, uint i, thread uint* raw) {
  load<1>((const device uint*)(w.grid + i / 8), raw);
  load<1>(w.signs + i / 32, raw + 1);
}

METAL_FUNC void octet(
    iq2_xxs w, const thread uint* raw, int o, thread float* v) {
  uint2 bytes = w.table[raw[0] >> 8 * o & 255];
  // Seven signs, and an eighth that makes the number of set bits even. Copies
  // seven bits apart bring one after the other to the top of a byte.
  uint signs = raw[1] >> 7 * o & 127;
  uint top[2] = {
      signs * 0x10204080u, signs * 0x01020408u + (popcount(signs) << 31)};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    uint word = bytes[j] ^ (top[j] & 0x80808080u);
    uint turned = word >> 8 | word << 24;
    halves(word & 0x803f803fu, v[4 * j + 1], v[4 * j + 3]);
    halves(turned & 0x803f803fu, v[4 * j + 2], v[4 * j]);
  }
}

METAL_FUNC uint2 packed(iq2_xxs w, uint i) {
  return uint2(as_type<ushort>(w.d[i / 256]), w.signs[i / 32]);
}

METAL_FUNC float2 scaling(iq2_xxs w, uint2 packed) {
  float scale = fma(float(packed.y >> 28), 4194304.0f, 2097152.0f);
  return float2(float(as_type<half>(ushort(packed.x))) * scale, 0);
}
