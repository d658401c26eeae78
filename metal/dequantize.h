// Weights as values. A matrix is a struct of its planes, laid out as by
// convert/repack.py, and a reader takes neighbouring columns of a row:
//
// fetch<Q>(w, i, raw)  loads the words of Q quads of columns, from element i on
// octet(w, raw, o, v)  makes the eight codes of the o-th octet exact floats
// packed(w, i)         loads what the scales of GROUP octets from i on lie in
// scaling(w, packed)   gives scale and minimum; scaling(w, i) does both
//
// and a weight is code * scale - minimum. i counts elements of the whole
// matrix, past 2^32 for none of Flash's, and is a multiple of 4 QUADS. Q is
// QUADS or 8. Types without MINIMA have a minimum of 0. read(w, i, v) gives the
// QUADS vectors from i on, exact or (with MINIMA) rounded once.
//
// lifted(w, raw, o, v) is cheaper than octet, and code c of a lane's 32 comes
// out as 2^lift<W>(c) of its value: for who multiplies columns beforehand.

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

// The halves of `bits` as floats. A code in the low bits of a half is a
// subnormal, 2^-24 of its value: scales make up.
METAL_FUNC void halves(uint bits, thread float& low, thread float& high) {
  float2 pair = float2(as_type<half2>(bits));
  low = pair.x;
  high = pair.y;
}

template <typename W>
constexpr METAL_FUNC int lift(int c) {
  return 0;
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
METAL_FUNC uint2 packed(dense<T> w, uint i) {
  return uint2(0);
}

template <typename T>
METAL_FUNC float2 scaling(dense<T> w, uint2 packed) {
  return float2(1, 0);
}

struct q8_0 {
  enum { WORDS = 2, QUADS = 2, GROUP = 4, MINIMA = 1 };
  const device uint* codes;  // + 128
  const device half* scales;
};

METAL_FUNC void octet(q8_0 w, const thread uint* raw, int o, thread float* v) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    uint word = raw[2 * o + j];
    halves(word & 0x00ff00ffu, v[4 * j], v[4 * j + 2]);
    halves(word >> 8 & 0x00ff00ffu, v[4 * j + 1], v[4 * j + 3]);
  }
}

METAL_FUNC uint2 packed(q8_0 w, uint i) {
  return uint2(as_type<ushort>(w.scales[i / 32]), 0);
}

METAL_FUNC float2 scaling(q8_0 w, uint2 packed) {
  return float(as_type<half>(ushort(packed.x))) * float2(16777216.0f, 128);
}

// Eight codes of four bits, in sequence from the low bits up.
METAL_FUNC void nibbles(uint word, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    halves(word >> 4 * j & 0x000f000fu, v[j], v[j + 4]);
  }
}

// The same, every second code where it stands and 16 times as large.
METAL_FUNC void lifted_nibbles(uint word, thread float* v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint bits = (j < 2 ? word : word >> 8) & 0x000f000fu << 4 * (j % 2);
    halves(bits, v[j], v[j + 4]);
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

template <>
constexpr METAL_FUNC int lift<q4_0>(int c) {
  return 4 * (c % 2);
}

METAL_FUNC void lifted(q4_0 w, const thread uint* raw, int o, thread float* v) {
  lifted_nibbles(raw[o], v);
}

METAL_FUNC uint2 packed(q4_0 w, uint i) {
  return uint2(as_type<ushort>(w.scales[i / 32]), 0);
}

METAL_FUNC float2 scaling(q4_0 w, uint2 packed) {
  return float(as_type<half>(ushort(packed.x))) * float2(16777216.0f, 8);
}

// Codes are e2m1 floats; a scale is the exponent byte of a float.
struct mxfp4 {
  enum { WORDS = 1, QUADS = 2, GROUP = 4, MINIMA = 0 };
  const device uint* codes;
  const device uchar* scales;
};

// A code moved to sign, exponent and mantissa of a half is 2^-14 of its value.
METAL_FUNC void octet(mxfp4 w, const thread uint* raw, int o, thread float* v) {
  uint word = raw[o];
  // The upper bytes of such halves, for codes 0 2 4 6 and 1 3 5 7.
  uint even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
  uint odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
  halves(even << 8 & 0xff00ff00u, v[0], v[4]);
  halves(odd << 8 & 0xff00ff00u, v[1], v[5]);
  halves(even & 0xff00ff00u, v[2], v[6]);
  halves(odd & 0xff00ff00u, v[3], v[7]);
}

METAL_FUNC uint2 packed(mxfp4 w, uint i) { return uint2(w.scales[i / 32], 0); }

METAL_FUNC float2 scaling(mxfp4 w, uint2 packed) {
  // Scales of 2^114 and above become infinite.
  uint exponent = min(packed.x + 14, 255u);
  return float2(as_type<float>(exponent << 23), 0);
}

#include "superblocks.h"

template <int Q, typename W>
METAL_FUNC void fetch(W w, uint i, thread uint* raw) {
  load<Q * W::WORDS / 2>(w.codes + i / (8 / W::WORDS), raw);
}

template <typename W>
METAL_FUNC void lifted(W w, const thread uint* raw, int o, thread float* v) {
  octet(w, raw, o, v);
}

template <typename W>
METAL_FUNC float2 scaling(W w, uint i) {
  return scaling(w, packed(w, i));
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
