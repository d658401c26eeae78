// The values of a packed matrix, for products with many rows: out = w, rounded
// to the type of `out`.
//
// Grid (ELEMENTS / 8 rounded up to the threadgroup): a thread owns the octet
// at its position, so that neighbours write neighbouring words. It loads what
// its octet shares with others (4 QUADS elements, see dequantize.h). Of a list
// of matrices: grid (a part of that, the list), a thread owns every octet
// that stands a whole number of x's threads behind its own.
#include "dequantize.h"
#include "octets.h"

// Octet o of those that the thread's neighbours from element `first` on share.
template <typename W, typename O>
METAL_FUNC void dequantize_octet(W w, uint first, int o, device O* out) {
  uint raw[4 * W::QUADS];
  float v[8];
  fetch<W::QUADS>(w, first, raw);
  octet(w, raw, o, v);
  float2 scale = scaling(w, first);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[j] = W::MINIMA ? fma(v[j], scale.x, -scale.y) : v[j] * scale.x;
  }
  store(out, v);
}

template <uint ELEMENTS, typename W, typename O>
METAL_FUNC void dequantize(W w, device O* out, uint at) {
  constexpr uint SHARED = W::QUADS / 2;
  uint first = 8 * (at - at % SHARED);
  if (first < ELEMENTS) {
    dequantize_octet(w, first, at % SHARED, out + 8 * at);
  }
}

// One of several matrices of ELEMENTS each, by `threads` threads.
template <uint ELEMENTS, typename W, typename O>
METAL_FUNC void dequantize_listed(
    W w, uint matrix, device O* out, uint at, uint threads) {
  constexpr uint SHARED = W::QUADS / 2;
  for (; at < ELEMENTS / 8; at += threads) {
    uint first = 8 * (at - at % SHARED);
    dequantize_octet(w, matrix * ELEMENTS + first, at % SHARED, out + 8 * at);
  }
}
