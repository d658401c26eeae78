// Rows of a table: out[i] = x[ids[i] / PER], rounded to the type of `out`. A
// row of an id of all ones is neither read nor written.
//
// Grid (elements of `out` / 8, rounded up to the threadgroup): a thread owns
// eight neighbours of a row.
#include "octets.h"

template <uint D, uint PER, typename I, typename O>
METAL_FUNC void gather_rows(
    const device float* x,  // [S, D]
    I ids,                  // [rows]
    device O* out,          // [rows, D]
    uint rows,
    uint at) {
  uint i = at / (D / 8);
  if (i >= rows || ids[i] == 0xffffffff) {
    return;
  }
  float v[8];
  load(x + ids[i] / PER * D + 8 * (at % (D / 8)), v);
  store(out + 8 * at, v);
}
