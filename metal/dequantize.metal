// The values of a packed matrix, for products with many rows: out = w, rounded
// to the type of `out`.
//
// Grid (ELEMENTS / 8 rounded up to the threadgroup): a thread owns the octet
// at its position, so that neighbours write neighbouring words. It loads what
// its octet shares with others (4 QUADS elements, see dequantize.h).
#include "dequantize.h"

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

template <uint ELEMENTS, typename W, typename O>
METAL_FUNC void dequantize(W w, device O* out, uint at) {
  constexpr uint SHARED = W::QUADS / 2;
  uint first = 8 * (at - at % SHARED);
  if (first >= ELEMENTS) {
    return;
  }
  uint raw[4 * W::QUADS];
  float v[8];
  fetch<W::QUADS>(w, first, raw);
  octet(w, raw, at % SHARED, v);
  float2 scale = scaling(w, first);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[j] = W::MINIMA ? fma(v[j], scale.x, -scale.y) : v[j] * scale.x;
  }
  store(out + 8 * at, v);
}
