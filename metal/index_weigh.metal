// Scores of entries for queries of prefill, from the products of their heads:
// out[n, c] = sum_h w[n, h] max(products[n, h, c], 0).
//
// Grid (C rounded up to the threadgroup, N): a thread owns one score. All
// float, the sum runs over h upwards.
template <uint HI, typename W>
METAL_FUNC void index_weigh(
    const device float* products,  // [N, HI, C]
    W w,                           // [N, HI]
    device float* out,             // [N, C]
    uint C,
    uint2 at) {
  if (at.x >= C) {
    return;
  }
  products += at.y * HI * C + at.x;
  float sum = 0;
#pragma unroll 8
  for (uint h = 0; h < HI; h++) {
    // A comparison, where max would hide a NaN.
    float product = products[h * C];
    sum += w[at.y * HI + h] * (product < 0 ? 0 : product);
  }
  out[at.y * C + at.x] = sum;
}
