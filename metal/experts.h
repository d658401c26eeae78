// What the two launches of the routed experts share: who computes for whom, and
// how eight weights of a packed row are read.
//
// A lane takes an octet: eight neighbouring columns, so that a simdgroup reads
// 256 columns of a row at a time and 4-bit codes as whole cache lines. `octet`
// of a type gives the eight codes as exact floats and returns the factor that
// is still to be applied to their sum. A minimum is taken off each code (code *
// scale is exact in a float: one rounding, as in the reference).

struct MXFP4 {
  const device uint* codes;
  const device uchar* scales;
};

struct Q8_0 {
  const device uint* codes;
  const device half* scales;
};

struct Q4_K {
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

struct Q2_K {
  const device uint* codes;
  const device uchar* scales;
  const device half* d;
};

struct IQ2_XXS {
  const device uchar* grid;
  const device uint* signs;
  const device half* d;
  const threadgroup uint2* table;  // the magnitudes of 8 elements, a byte each
};

// Four fields of `mask` from the lower half of `word` and four from the upper
// one, `bits` apart, as the bits of halves: a code c is the subnormal c *
// 2^-24.
METAL_FUNC void spread(
    uint word, uint bits, uint mask, thread float4& low, thread float4& high) {
  for (uint j = 0; j < 4; j++) {
    float2 pair = float2(as_type<half2>((word >> (bits * j)) & mask));
    low[j] = pair.x;
    high[j] = pair.y;
  }
}

// E2M1 moved to the sign, exponent and mantissa of a half is the value times
// 2^-14.
METAL_FUNC float octet(
    MXFP4 w, int row, int o, thread float4& low, thread float4& high) {
  uint word = w.codes[row + o];
  for (uint j = 0; j < 4; j++) {
    uint nibbles = word >> (4 * j);
    uint bits =
        ((nibbles << 9) & 0x0e000e00u) | ((nibbles << 12) & 0x80008000u);
    float2 pair = float2(as_type<half2>(bits));
    low[j] = pair.x;
    high[j] = pair.y;
  }
  // 2^14 joins the scale; scales of 2^114 and above become infinite.
  return as_type<float>(min(uint(w.scales[row / 4 + o / 4]) + 14, 255u) << 23);
}

METAL_FUNC float octet(
    Q8_0 w, int row, int o, thread float4& low, thread float4& high) {
  uint first = w.codes[2 * row + 2 * o];
  uint second = w.codes[2 * row + 2 * o + 1];
  low = float4(as_type<char4>(first ^ 0x80808080u));  // stored as code + 128
  high = float4(as_type<char4>(second ^ 0x80808080u));
  return float(w.scales[row / 4 + o / 4]);
}

METAL_FUNC float octet(
    Q4_K w, int row, int o, thread float4& low, thread float4& high) {
  spread(w.codes[row + o], 4, 0x000f000fu, low, high);
  const device uchar* packed = w.scales + (row / 32 + o / 32) * 12;
  uint i = o / 4 % 8;
  uint scale = packed[i & 3];
  uint least = packed[4 + (i & 3)];
  if (i < 4) {
    scale &= 63;
    least &= 63;
  } else {
    uint both = packed[4 + i];
    scale = (both & 15) | ((scale >> 6) << 4);
    least = (both >> 4) | ((least >> 6) << 4);
  }
  float scales =
      float(w.d[row / 32 * 2 + o / 32 * 2]) * float(scale) * 16777216.0f;
  float4 mins =
      float4(-float(w.d[row / 32 * 2 + o / 32 * 2 + 1]) * float(least));
  low = fma(float4(scales), low, mins);
  high = fma(float4(scales), high, mins);
  return 1;
}

METAL_FUNC float octet(
    Q2_K w, int row, int o, thread float4& low, thread float4& high) {
  uint word = w.codes[row / 2 + o / 2] >> (16 * (o & 1)) & 0xffffu;
  spread(word | (word << 8), 2, 0x00030003u, low, high);
  uint packed = w.scales[row / 2 + o / 2];
  float scales =
      float(w.d[row / 32 * 2 + o / 32 * 2]) * float(packed & 15) * 16777216.0f;
  float4 mins =
      float4(-float(w.d[row / 32 * 2 + o / 32 * 2 + 1]) * float(packed >> 4));
  low = fma(float4(scales), low, mins);
  high = fma(float4(scales), high, mins);
  return 1;
}

// Four bytes, those whose bit is set in the low bits of `signs` negated (none
// is 0).
METAL_FUNC float4 signed_bytes(uint bytes, uint signs) {
  uint ones = ((signs & 15) * 0x00204081u) & 0x01010101u;
  return float4(as_type<char4>((bytes ^ (ones * 255)) + ones));
}

METAL_FUNC float octet(
    IQ2_XXS w, int row, int o, thread float4& low, thread float4& high) {
  uint word = w.signs[row / 4 + o / 4];
  uint2 bytes = w.table[w.grid[row + o]];
  uint signs = (word >> (7 * (o & 3))) & 127;
  uint parity = 0x6996u >> ((signs ^ (signs >> 4)) & 15) & 1;
  low = signed_bytes(bytes.x, signs);
  high = signed_bytes(bytes.y, (signs >> 4) | (parity << 3));
  return float(w.d[row / 32 + o / 32]) * (0.125f + 0.25f * float(word >> 28));
}

// `sum` plus the product of one octet of weights with one of x, in a fixed
// order: every step is an explicit fma, which no compiler may contract in
// another way.
METAL_FUNC float plus(
    float sum, const thread float4* w, float factor, float4 a, float4 b) {
  float product = w[0].x * a.x;
  product = fma(w[0].y, a.y, product);
  product = fma(w[0].z, a.z, product);
  product = fma(w[0].w, a.w, product);
  product = fma(w[1].x, b.x, product);
  product = fma(w[1].y, b.y, product);
  product = fma(w[1].z, b.z, product);
  product = fma(w[1].w, b.w, product);
  return fma(factor, product, sum);
}

// The slots (row * K + place, at most 64) with the expert of `slot`, a bit
// each. All lanes take part. The first of them computes for all: every slot
// keeps a sum of its own.
template <typename I>
METAL_FUNC ulong together(I ids, uint count, uint slot, uint lane) {
  uint expert = ids[slot];
  ulong same = 0;
  for (uint first = 0; first < count; first += 32) {
    uint s = first + lane;
    bool equal = s < count && uint(ids[s]) == expert;
    same |= ulong(simd_vote::vote_t(simd_ballot(equal))) << first;
  }
  return same;
}

// Move the next M slots from `left` to `slots`; the number of them. `slot` is
// the first.
template <int M>
METAL_FUNC uint
next(thread ulong& left, thread uint& slot, thread uint* slots) {
  uint live = 0;
  for (uint m = 0; m < M; m++) {
    slots[m] = slot;
    live += left ? 1 : 0;
    left &= left - 1;
    while (left && !(left >> slot & 1)) {
      slot++;
    }
  }
  return live;
}
