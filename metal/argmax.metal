// The greatest logit of a row, the lowest id on ties, and how far it is above
// the second greatest. A NaN counts as minus infinity. No sum: the result does
// not depend on the order.
//
// Two launches: in the first a threadgroup owns a part of a row, in the second
// a row's parts.
#include "argmax.h"

// Grid (THREADS * P, N): a thread owns every THREADS-th of PER * THREADS
// logits.
template <int THREADS, int PER>
METAL_FUNC void argmax(
    const device float* logits,  // [N, V]
    device float* values,        // [N, P, 2], the two greatest
    device uint* places,         // [N, P]
    threadgroup float2* among,   // of the simdgroups
    threadgroup uint* among_places,
    uint V,
    uint2 part,  // which of how many
    uint n,
    uint tid) {
  float mine[PER];
  uint first = part.x * PER * THREADS + tid;
#pragma unroll
  for (uint i = 0; i < PER; i++) {
    mine[i] = logits[n * V + min(first + THREADS * i, V - 1)];
  }
  top found = none();
#pragma unroll
  for (uint i = 0; i < PER; i++) {
    uint v = first + THREADS * i;
    found = better(found, of(v < V ? mine[i] : -INFINITY, v));
  }
  found = best(found, among, among_places, tid, THREADS);
  if (tid == 0) {
    uint at = n * part.y + part.x;
    values[2 * at] = found.first;
    values[2 * at + 1] = found.second;
    places[at] = found.id;
  }
}

// Grid (32, N).
template <typename V, typename I>
METAL_FUNC void argmax_last(
    V values,  // [N, P, 2]
    I places,  // [N, P]
    device int* ids,
    device float* margins,
    uint P,
    uint n,
    uint lane) {
  top found = none();
  for (uint p = lane; p < P; p += 32) {
    uint at = n * P + p;
    found = better(found, {values[2 * at], values[2 * at + 1], places[at]});
  }
  found = best(found);
  if (lane == 0) {
    ids[n] = found.id;
    margins[n] = found.first - found.second;
  }
}
