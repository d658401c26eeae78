// Root mean square normalisation: out = w * x / sqrt(mean(x^2) + eps), over D.
//
// Grid (threads * rows): a threadgroup owns a row, a thread every threads-th
// channel. All float. Squares are summed over a thread's channels, then the
// simdgroup, then simdgroups upwards.
template <bool WEIGHTED, typename X, typename W>
METAL_FUNC void rms_norm(
    X x,                      // [rows, D]
    W w,                      // [D] if WEIGHTED
    device float* out,        // [rows, D]
    threadgroup float* sums,  // of the simdgroups
    float eps,
    uint D,
    uint row,
    uint tid,
    uint threads) {
  float sum = 0;
  for (uint d = tid; d < D; d += threads) {
    float channel = x[row * D + d];
    sum += channel * channel;
  }
  sum = simd_sum(sum);
  if (tid % 32 == 0) {
    sums[tid / 32] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = 0;
  for (uint s = 0; s < threads / 32; s++) {
    sum += sums[s];
  }
  float norm = rsqrt(sum / D + eps);
  for (uint d = tid; d < D; d += threads) {
    float channel = x[row * D + d] * norm;
    out[row * D + d] = WEIGHTED ? channel * w[d] : channel;
  }
}
