// The values of a packed matrix, for products with many rows: out = w, rounded
// to the type of `out`.
//
// Grid (ELEMENTS / (4 QUADS) rounded up to the threadgroup): a thread owns
// 4 QUADS neighbouring elements, as dequantize.h reads them.
#include "dequantize.h"

template <uint ELEMENTS, typename W, typename O>
METAL_FUNC void dequantize(W w, device O* out, uint pos) {
  uint first = 4 * W::QUADS * pos;
  if (first >= ELEMENTS) {
    return;
  }
  float4 v[W::QUADS];
  read(w, first, v);
  device vec<O, 4>* to = (device vec<O, 4>*)(out + first);
  for (int q = 0; q < W::QUADS; q++) {
    to[q] = vec<O, 4>(v[q]);
  }
}
