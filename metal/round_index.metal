// The Hadamard transform and fp4 round trip of indexer keys, as round_index.h
// has them.
//
// Grid (32 * rows): a simdgroup owns a row of DI = 32 C channels.
#include "round_index.h"

template <int C>
METAL_FUNC void round_index(
    const device float* x,  // [rows, DI]
    device float* out,      // [rows, DI]
    uint row,
    uint lane) {
  float v[C];
  uint first = (row * 32 + lane) * C;
  for (int i = 0; i < C; i++) {
    v[i] = x[first + i];
  }
  round_index<C>(v, lane);
  for (int i = 0; i < C; i++) {
    out[first + i] = v[i];
  }
}
