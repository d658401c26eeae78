// Rows of a table: out[n] = w[ids[n]], values as dequantize.h makes them.
//
// Grid (D / 8 rounded up to the threadgroup, N): a thread owns eight channels.
#include "embed.h"

template <typename W, typename I>
METAL_FUNC void embed(
    W w,                // [V, D]
    I ids,              // [N]
    device float* out,  // [N, D]
    uint D,
    uint2 pos) {
  uint d = 8 * pos.x;
  if (d >= D) {
    return;
  }
  float4 v[2];
  eight(w, ids[pos.y] * D + d, v);
  device float4* to = (device float4*)(out + pos.y * D + d);
  to[0] = v[0];
  to[1] = v[1];
}
