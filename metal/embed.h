// Eight neighbouring values of a matrix, from element i on.
#include "dequantize.h"

template <typename W>
METAL_FUNC void eight(W w, uint i, thread float4* v) {
  static_assert(W::QUADS <= 2, "reads eight or four");
  for (int j = 0; j < 2; j += W::QUADS) {
    read(w, i + 4 * j, v + j);
  }
}
