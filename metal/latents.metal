// From an attention layer's products to what attention reads: a row of D
// channels is normalised, out = norm * v / sqrt(mean(v^2) + eps), its last R
// channels are rotated in adjacent pairs, and where ROUNDED the others go
// through fp8 as in round_kv. The row is a product (the low-rank query, the
// key row), or a window of RATIO tokens pooled over its candidates m,
//   v[d] = sum_m c[m, d] exp(s[m, d] - top) / sum_m exp(s[m, d] - top),
// where top is the largest of the first FEW, 2 FEW ... as the sums grow. For
// ratio 4 the candidates are the first halves of the rows before the window and
// the second halves of its own.
//
// The ring is written anew: its old rows, and the block's in their places.
//
// A threadgroup owns a row, or 8 old floats a thread; a simdgroup every eighth
// block of 64 channels, a lane two of each. All float. Squares are summed over
// a lane's channels, then the simdgroup, then simdgroups upwards; candidates
// upwards.
#include "round_kv.metal"

constant constexpr int FEW = 8;  // candidates that a lane reads at a time
constant constexpr uint COPIED = 2048;  // floats of a threadgroup

struct latents_product {
  const device float* row;  // [D]
};

METAL_FUNC float latents_channel(latents_product from, uint d) {
  return from.row[d];
}

// Rows [c | s] of an open window: of tokens before the block from the ring, of
// the block itself from the products.
struct latents_window {
  const device float* ring;  // [CAP, STRIDE], its columns from c on
  const device float* c;     // [N, P], of which WIDTH columns
  const device float* s;     // the same, without ape
  int CAP;
  int STRIDE;
  int P;
  int WIDTH;
  int RATIO;
  int position;  // of the block's first token
  int window;
};

template <typename A>
struct latents_pool {
  latents_window rows;
  A ape;  // [RATIO, WIDTH]
};

template <typename A>
METAL_FUNC latents_pool<A> latents_made(latents_window rows, A ape) {
  return {rows, ape};
}

template <typename A>
METAL_FUNC float2 latents_candidate(latents_pool<A> from, int t, uint d) {
  latents_window w = from.rows;
  bool kept = t < w.position;
  const device float* old = w.ring + ulong(t % w.CAP) * w.STRIDE + d;
  uint at = kept ? 0 : (t - w.position) * w.P + d;
  float ape = from.ape[t % w.RATIO * w.WIDTH + d];
  float c = *(kept ? old : w.c + at);
  float s = *(kept ? old + w.WIDTH : w.s + at);
  return float2(c, kept ? s : s + ape);
}

template <typename A>
METAL_FUNC float latents_channel(latents_pool<A> from, uint d) {
  latents_window w = from.rows;
  bool overlaps = w.RATIO == 4;
  int own = w.window * w.RATIO;
  int first = overlaps ? own - w.RATIO : own;
  uint half_width = overlaps ? w.WIDTH / 2 : 0;
  float top = -INFINITY;
  float sum = 0;
  float total = 0;
  for (int start = first; start < own + w.RATIO; start += FEW) {
    float2 candidate[FEW];
    float highest = top;
#pragma unroll
    for (int i = 0; i < FEW; i++) {
      // Before the first window nothing is; its own tokens stand in.
      int t = start + i < 0 ? start + i + w.RATIO : start + i;
      candidate[i] = latents_candidate(from, t, t < own ? d : half_width + d);
      candidate[i].y = start + i < 0 ? -INFINITY : candidate[i].y;
      highest = max(highest, candidate[i].y);
    }
    float fade = exp(top - highest);
    sum *= fade;
    total *= fade;
    for (int i = 0; i < FEW; i++) {
      float weight = exp(candidate[i].y - highest);
      sum += weight * candidate[i].x;
      total += weight;
    }
    top = highest;
  }
  return sum / total;
}

template <int D, int R, bool ROUNDED, typename S, typename W, typename T>
METAL_FUNC void latents_row(
    S from,
    W norm,                   // [D]
    T turn,                   // [R / 2] pairs: cosine, sine; R = 0: not rotated
    device float* out,        // [D]
    threadgroup float* sums,  // [8]
    float eps,
    uint sg,
    uint lane) {
  constexpr int BLOCKS = (D + 511) / 512;
  float2 v[BLOCKS];
  float2 gain[BLOCKS];  // under way meanwhile: no cache holds them
  float squares = 0;
  for (int b = 0; b < BLOCKS; b++) {
    uint d = 64 * (8 * b + sg) + lane;
    gain[b].x = d < D ? float(norm[d]) : 0;
    gain[b].y = d + 32 < D ? float(norm[d + 32]) : 0;
    v[b].x = d < D ? latents_channel(from, d) : 0;
    v[b].y = d + 32 < D ? latents_channel(from, d + 32) : 0;
    squares += v[b].x * v[b].x;
    squares += v[b].y * v[b].y;
  }
  squares = simd_sum(squares);
  if (lane == 0) {
    sums[sg] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  squares = 0;
  for (uint s = 0; s < 8; s++) {
    squares += sums[s];
  }
  float scale = rsqrt(squares / D + eps);
  for (int b = 0; b < BLOCKS; b++) {
    uint first = 64 * (8 * b + sg);
    for (int i = 0; i < 2; i++) {
      uint d = first + 32 * i + lane;
      float own = v[b][i] * scale * gain[b][i];
      float other = simd_shuffle_xor(own, 1);
      if (R > 0 && d >= D - R && d < D) {
        uint r = d - (D - R);
        float cosine = turn[r / 2 * 2];
        float sine = turn[r / 2 * 2 + 1];
        own = own * cosine + other * (r % 2 == 1 ? sine : -sine);
      }
      v[b][i] = own;
    }
    if (ROUNDED && first < D - R) {
      v[b] = round_block(v[b]);
    }
    for (int i = 0; i < 2; i++) {
      uint d = first + 32 * i + lane;
      if (d < D) {
        out[d] = v[b][i];
      }
    }
  }
}

// The columns [c | s] of one of the block's rows, which the ring keeps.
template <typename A>
METAL_FUNC void latents_keep(
    latents_pool<A> from,
    uint n,
    device float* out,  // [2 * WIDTH]
    uint tid) {
  latents_window w = from.rows;
  constexpr int AHEAD = 4;  // loads that are under way before the first store
  for (int start = tid; start < w.WIDTH; start += 256 * AHEAD) {
    float2 kept[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int d = min(start + 256 * i, w.WIDTH - 1);
      kept[i] = latents_candidate(from, w.position + n, d);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int d = start + 256 * i;
      if (d < w.WIDTH) {
        out[d] = kept[i].x;
        out[w.WIDTH + d] = kept[i].y;
      }
    }
  }
}

// Part `share` of the rows that the N from `position` on do not replace.
template <uint W>
METAL_FUNC void latents_copy(
    const device float* ring,  // [CAP, W]
    device float* held,        // [CAP, W]
    uint CAP,
    uint position,
    uint N,
    uint share,
    uint tid) {
  float old[COPIED / 256];
#pragma unroll
  for (uint i = 0; i < COPIED / 256; i++) {
    uint at = COPIED * share + 256 * i + tid;
    old[i] = ring[min(at, CAP * W - 1)];
  }
#pragma unroll
  for (uint i = 0; i < COPIED / 256; i++) {
    uint at = COPIED * share + 256 * i + tid;
    uint after = (at / W + CAP - position % CAP) % CAP;
    if (at < CAP * W && after >= N) {
      held[at] = old[i];
    }
  }
}
