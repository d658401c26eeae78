// The read-out collapse of a token's streams x, flattened to K = HC * D
// channels: m = (fn x) / sqrt(mean(x^2) + norm_eps) * scale + base,
// out = sum_j (sigmoid(m_j) + eps) x_j.
//
// Two launches, all float. In the first a threadgroup owns a chunk of channels
// of all tokens and a simdgroup a row of fn, which it reads once; sums run over
// a lane's channels, then the simdgroup. In the second a threadgroup owns some
// channels of a token's output and adds the chunks anew: a lane's upwards, then
// the simdgroup.
constant constexpr uint CHUNK = 256;

// Grid (32 * (HC + 1), ceil(K / CHUNK)); simdgroup HC sums x^2.
template <int HC, typename T>
METAL_FUNC void hc_head_part(
    const device float* x,  // [N, K]
    const device T* fn,     // [HC, K]
    device float* part,     // [N, HC + 1, CHUNKS]
    uint N,
    uint K,
    uint CHUNKS,
    uint chunk,
    uint m,
    uint lane) {
  float weight[CHUNK / 32];
  for (uint i = 0; i < CHUNK / 32; i++) {
    uint k = chunk * CHUNK + 32 * i + lane;
    weight[i] = m < HC && k < K ? float(fn[m * K + k]) : 0;
  }
  for (uint n = 0; n < N; n++) {
    float sum = 0;
    for (uint i = 0; i < CHUNK / 32; i++) {
      uint k = chunk * CHUNK + 32 * i + lane;
      float channel = k < K ? x[n * K + k] : 0;
      sum += (m < HC ? weight[i] : channel) * channel;
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      part[(n * (HC + 1) + m) * CHUNKS + chunk] = sum;
    }
  }
}

// Grid (D rounded up to the threadgroup, N), HC + 1 simdgroups or more.
template <int HC, typename P, typename B>
METAL_FUNC void hc_head_finish(
    const device float* x,
    P part,  // in `constant` space for one chunk
    B scale,
    B base,                   // [HC]
    device float* out,        // [N, D]
    threadgroup float* sums,  // [HC + 1]
    float eps,
    float norm_eps,
    uint D,
    uint CHUNKS,
    uint2 pos,
    uint sg,
    uint lane) {
  uint n = pos.y;
  if (sg <= HC) {
    float sum = 0;
    for (uint c = lane; c < CHUNKS; c += 32) {
      sum += part[(n * (HC + 1) + sg) * CHUNKS + c];
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      sums[sg] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint d = pos.x;
  if (d >= D) {
    return;
  }
  float norm = rsqrt(sums[HC] / (HC * D) + norm_eps);
  float sum = 0;
  for (int j = 0; j < HC; j++) {
    float m = sums[j] * norm * scale[0] + base[j];
    sum += (1 / (1 + exp(-m)) + eps) * x[(n * HC + j) * D + d];
  }
  out[n * D + d] = sum;
}
