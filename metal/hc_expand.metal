#include "streams.h"

// Hyper-connection expand: write a sublayer's output back into the streams,
// out[n, k] = post[n, k] * y[n] + sum_j comb[n, j, k] * x[n, j].
//
// Grid (D rounded up to the threadgroup, N): one thread per token and channel
// owns that channel of all HC streams. All float; the sum runs over j upwards,
// then post * y is added, bit for bit as in streams.h.
template <int HC, typename P, typename C>
METAL_FUNC void hc_expand(
    const device float* x,  // [N, HC, D]
    const device float* y,  // [N, D]
    P post,                 // [N, HC], in `constant` space for one token
    C comb,                 // [N, HC, HC]
    device float* out,      // [N, HC, D]
    uint D,
    uint2 pos) {
  uint d = pos.x;
  uint n = pos.y;
  if (d >= D) {
    return;
  }
  float stream[HC];
  for (int j = 0; j < HC; j++) {
    stream[j] = x[(n * HC + j) * D + d];
  }
  for (int k = 0; k < HC; k++) {
    float weight[HC];
    for (int j = 0; j < HC; j++) {
      weight[j] = comb[(n * HC + j) * HC + k];
    }
    out[(n * HC + k) * D + d] =
        written_back<HC>(stream, weight, post[n * HC + k], y[n * D + d]);
  }
}
