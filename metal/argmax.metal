// The greatest logit of a row, the lowest id on ties, and how far it is above
// the second greatest. A NaN counts as minus infinity.
//
// Grid (threads, N): a threadgroup owns a row, a thread every threads-th
// logit. No sum: the result does not depend on the order.
#include "argmax.h"

METAL_FUNC void argmax(
    const device float* logits,  // [N, V]
    device int* ids,             // [N]
    device float* margins,       // [N]
    threadgroup float2* values,  // of the simdgroups
    threadgroup uint* places,
    uint V,
    uint n,
    uint tid,
    uint threads) {
  top found = none();
#pragma unroll 8
  for (uint v = tid; v < V; v += threads) {
    found = better(found, of(logits[n * V + v], v));
  }
  found = best(found, values, places, tid, threads);
  if (tid == 0) {
    ids[n] = found.id;
    margins[n] = found.first - found.second;
  }
}
