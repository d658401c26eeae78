// Hyper-connection coefficients of a token's streams x, flattened to K
// channels: m = (fn x) / sqrt(mean(x^2) + eps) * scale + base, M = (2 + HC) HC
// values, then pre = sigmoid + hc_eps, post = 2 sigmoid, comb = Sinkhorn of a
// softmax.
//
// Two launches, all float. In the first a threadgroup owns a chunk of 256
// channels for all tokens: a simdgroup reads a row of fn once and multiplies it
// with each token, summing over a lane's channels, then the simdgroup. In the
// second a threadgroup owns a token and adds its chunks.
constant constexpr uint CHUNK = 256;

// Grid (32 * simdgroups, ceil(K / CHUNK)).
template <typename T>
METAL_FUNC void hc_mix_part(
    const device float* x,  // [N, K]
    const device T* fn,     // [M, K]
    device float* part,     // [N, CHUNKS, M + 1], the last: sum of x^2
    uint N,
    uint M,
    uint K,
    uint2 group,  // simdgroups, chunks: how many
    uint2 pos,    // which
    uint lane) {
  uint start = pos.y * CHUNK + lane;
  for (uint m = pos.x; m <= M; m += group.x) {
    float weight[CHUNK / 32] = {};
    for (uint i = 0; m < M && i < CHUNK / 32; i++) {
      uint k = start + 32 * i;
      weight[i] = k < K ? float(fn[m * K + k]) : 0;
    }
    for (uint n = 0; n < N; n++) {
      float sum = 0;
      for (uint i = 0; i < CHUNK / 32; i++) {
        uint k = start + 32 * i;
        if (k < K) {
          float channel = x[n * K + k];
          sum += (m < M ? weight[i] : channel) * channel;
        }
      }
      sum = simd_sum(sum);
      if (lane == 0) {
        part[(n * group.y + pos.y) * (M + 1) + m] = sum;
      }
    }
  }
}

// Grid (256, N). Lane m of simdgroup s adds chunks s, s + 8, ... of value m;
// the first simdgroup adds the eight sums upwards and holds comb[j, k] in lane
// j * HC + k; HC is 2 or 4. Lanes past the values repeat others'.
template <int HC, int ITERATIONS, typename S, typename B>
METAL_FUNC void hc_mix_finish(
    const device float* part,
    S scale,                  // [3]
    B base,                   // [M]
    device float* pre,        // [N, HC]
    device float* post,       // [N, HC]
    device float* comb,       // [N, HC, HC]
    threadgroup float* sums,  // [8, 32]
    float hc_eps,
    float norm_eps,
    uint K,
    uint CHUNKS,
    uint n,
    uint sg,
    uint lane) {
  constexpr uint M = (2 + HC) * HC;
  uint value = min(lane, M);
  float sum = 0;
  for (uint c = sg; c < CHUNKS; c += 8) {
    sum += part[(n * CHUNKS + c) * (M + 1) + value];
  }
  sums[32 * sg + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg > 0) {
    return;
  }
  for (uint s = 1; s < 8; s++) {
    sum += sums[32 * s + lane];
  }
  float norm = rsqrt(simd_shuffle(sum, M) / K + norm_eps);

  uint gate = lane % (2 * HC);
  float m = simd_shuffle(sum, gate) * norm * scale[gate / HC] + base[gate];
  float sigmoid = 1 / (1 + exp(-m));
  if (lane < HC) {
    pre[n * HC + lane] = sigmoid + hc_eps;
  } else if (lane < 2 * HC) {
    post[n * HC + lane - HC] = 2 * sigmoid;
  }

  uint entry = lane % (HC * HC);
  float a = simd_shuffle(sum, 2 * HC + entry) * norm * scale[2] +
            base[2 * HC + entry];
  float top = a;
  for (ushort k = 1; k < HC; k *= 2) {
    top = max(top, simd_shuffle_xor(top, k));
  }
  a = exp(a - top);
  for (int i = 0; i < ITERATIONS; i++) {
    float row = a;
    for (ushort k = 1; k < HC; k *= 2) {
      row += simd_shuffle_xor(row, k);
    }
    // The first division is the softmax's.
    a = i == 0 ? a / row + hc_eps : a / (row + hc_eps);
    float column = a;
    for (ushort j = HC; j < HC * HC; j *= 2) {
      column += simd_shuffle_xor(column, j);
    }
    a /= column + hc_eps;
  }
  if (lane < HC * HC) {
    comb[n * HC * HC + lane] = a;
  }
}
