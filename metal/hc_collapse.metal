// Hyper-connection collapse: weigh a token's streams into the row that a
// sublayer reads, out[n] = sum_j pre[n, j] * x[n, j].
//
// Grid (D rounded up to the threadgroup, N): one thread owns one channel of a
// token. All float; the sum runs over j upwards.
template <int HC, typename P>
METAL_FUNC void hc_collapse(
    const device float* x,  // [N, HC, D]
    P pre,                  // [N, HC], in `constant` space for one token
    device float* out,      // [N, D]
    uint D,
    uint2 pos) {
  uint d = pos.x;
  uint n = pos.y;
  if (d >= D) {
    return;
  }
  float sum = 0;
  for (int j = 0; j < HC; j++) {
    sum += pre[n * HC + j] * x[(n * HC + j) * D + d];
  }
  out[n * D + d] = sum;
}
