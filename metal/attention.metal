// Attention with a sink over a list of keys, which are also the values,
//   out[n, h] = sum_k p_k key_k / sum_k p_k,
//   p_k = exp(q[n, h] . key_k / sqrt(DH)),
// where the sink of the head adds its exp to the denominator alone. q is
// normalised to mean(q^2) = 1 and its last R channels are rotated; those of
// the result are rotated back.
//
// The keys of query n are the rows of the last WINDOW positions, from the ring
// or the block, then the first entries or those selected for it. Tiles of 8
// keys form at most 32 splits; which keys a split holds depends on the length
// of the query's own list. One simdgroup owns HEADS heads of a split, a lane a
// 32nd of the channels: it reads FEW keys at a time, scores them, and adds them
// with their weights. All float. Sums run over a lane's channels, then the
// simdgroup; over keys upwards, then splits.
constant constexpr int TILE = 8;
constant constexpr int FEW = 4;
constant constexpr int SPLITS = 32;  // a lane each in the merge

struct attention_keys {
  int first;    // position of the first row
  int window;   // how many rows
  int entries;  // how many entries
  bool listed;  // they are those of `ids`
};

// What query n sees. Without CAUSAL all of a block see each other, and the
// WINDOW positions before it. TOPK 0: nothing is selected.
template <int WINDOW, int RATIO, int TOPK, bool CAUSAL>
METAL_FUNC attention_keys attention_list(int position, int n, int N) {
  int end = position + (CAUSAL ? n + 1 : N);
  int first = max(0, CAUSAL ? end - WINDOW : position - WINDOW);
  int ready = RATIO ? (position + n + 1) / max(RATIO, 1) : 0;
  bool listed = TOPK && ready > TOPK;
  return {first, end - first, listed ? TOPK : ready, listed};
}

METAL_FUNC int attention_split_size(attention_keys list) {
  int tiles = (list.window + list.entries + TILE - 1) / TILE;
  return (tiles + SPLITS - 1) / SPLITS * TILE;
}

struct attention_rows {
  const device float* rows;     // [N, STRIDE] of the block
  const device float* ring;     // [CAP, STRIDE] of the positions before it
  const device float* entries;  // [C, DH]
  int CAP;
  int STRIDE;
  int position;
};

template <typename I>
METAL_FUNC const device float* attention_key(
    attention_keys list, attention_rows from, I ids, int k, int DH) {
  if (k < list.window) {
    int t = list.first + k;
    return t < from.position ? from.ring + t % from.CAP * from.STRIDE
                             : from.rows + (t - from.position) * from.STRIDE;
  }
  k -= list.window;
  return from.entries + ulong(list.listed ? int(ids[k]) : k) * DH;
}

// Rotate pairs by the cosines and sines from `turn` on, back if INVERSE.
template <bool INVERSE, typename T>
METAL_FUNC float4 attention_turn(float4 v, T turn) {
  float2 sines = float2(turn[1], turn[3]);
  sines = INVERSE ? -sines : sines;
  return v * float4(turn[0], turn[0], turn[2], turn[2]) +
         float4(-v.y, v.x, -v.w, v.z) * float4(sines.xx, sines.yy);
}

// Grid (simdgroups of HEADS heads, SPLITS, N).
template <int DH, int R, int HEADS, typename T, typename I>
METAL_FUNC void attention_part(
    const device float* q,  // [N, H, DH]
    T turns,                // [N, R / 2] pairs: cosine, sine
    attention_rows from,
    I ids,               // [N, TOPK]
    device float* part,  // [N, SPLITS, H, DH], relative to its top
    device float* stat,  // [N, SPLITS, H, 2]: top score, sum of exp
    attention_keys list,
    float eps,
    int H,
    int n,
    int split,
    uint sg,
    uint lane) {
  int head = sg * HEADS;
  int size = attention_split_size(list);
  int first = split * size;
  int last = min(list.window + list.entries, first + size);
  if (head >= H || first >= last) {
    return;
  }
  constexpr int J = DH / 128;
  float4 query[HEADS][J], sum[HEADS][J];
  float top[HEADS], total[HEADS];
  for (int h = 0; h < HEADS; h++) {
    int own = n * H + min(head + h, H - 1);
    const device float4* row = (const device float4*)(q + own * DH);
    float squares = 0;
    for (int j = 0; j < J; j++) {
      query[h][j] = row[32 * j + lane];
      squares += dot(query[h][j], query[h][j]);
      sum[h][j] = 0;
    }
    float scale = rsqrt(simd_sum(squares) / DH + eps);
    for (int j = 0; j < J; j++) {
      int r = 4 * (32 * j + int(lane)) - (DH - R);
      query[h][j] *= scale;
      if (r >= 0) {
        query[h][j] = attention_turn<false>(query[h][j], turns + n * R + r);
      }
      query[h][j] *= rsqrt(float(DH));
    }
    top[h] = -INFINITY;
    total[h] = 0;
  }

  for (int k = first; k < last; k += FEW) {
    float4 key[FEW][J];
    for (int u = 0; u < FEW; u++) {
      // Past the end the last key stands in, with weight 0.
      const device float4* row = (const device float4*)attention_key(
          list, from, ids, min(k + u, last - 1), DH);
      for (int j = 0; j < J; j++) {
        key[u][j] = row[32 * j + lane];
      }
    }
    for (int h = 0; h < HEADS; h++) {
      float4 score = 0;
      for (int u = 0; u < FEW; u++) {
        for (int j = 0; j < J; j++) {
          score[u] += dot(query[h][j], key[u][j]);
        }
      }
      score = simd_sum(score);
      float highest = top[h];
      for (int u = 0; u < FEW; u++) {
        score[u] = k + u < last ? score[u] : -INFINITY;
        highest = max(highest, score[u]);
      }
      float fade = exp(top[h] - highest);
      top[h] = highest;
      float4 weight = exp(score - highest);
      total[h] *= fade;
      for (int u = 0; u < FEW; u++) {
        total[h] += weight[u];
      }
      for (int j = 0; j < J; j++) {
        sum[h][j] *= fade;
        for (int u = 0; u < FEW; u++) {
          sum[h][j] += weight[u] * key[u][j];
        }
      }
    }
  }

  for (int h = 0; h < HEADS && head + h < H; h++) {
    int own = (n * SPLITS + split) * H + head + h;
    device float4* to = (device float4*)(part + own * DH);
    for (int j = 0; j < J; j++) {
      to[32 * j + lane] = sum[h][j];
    }
    if (lane == 0) {
      stat[2 * own] = top[h];
      stat[2 * own + 1] = total[h];
    }
  }
}

// Grid (DH / 4, H, N): one thread owns four channels of a head and adds the
// query's splits upwards; lane s of every simdgroup weighs split s.
template <int DH, int R, typename T, typename S>
METAL_FUNC void attention_merge(
    const device float* part,
    const device float* stat,
    T turns,
    S sink,             // [H]
    device float* out,  // [N, H, DH]
    attention_keys list,
    int H,
    uint3 pos,
    uint lane) {
  int size = attention_split_size(list);
  uint splits = (list.window + list.entries + size - 1) / size;
  uint own = pos.z * SPLITS * H + pos.y;
  float top = -INFINITY;
  float total = 0;
  if (lane < splits) {
    top = stat[2 * (own + lane * H)];
    total = stat[2 * (own + lane * H) + 1];
  }
  float highest = max(simd_max(top), sink[pos.y]);
  float weight = exp(top - highest);
  total = simd_sum(total * weight) + exp(sink[pos.y] - highest);
  float4 sum = 0;
  const device float4* from = (const device float4*)(part + own * DH);
  for (uint s = 0; s < splits; s++) {
    sum += simd_broadcast(weight, s) * from[s * H * (DH / 4) + pos.x];
  }
  sum /= total;
  int r = 4 * int(pos.x) - (DH - R);
  if (r >= 0) {
    sum = attention_turn<true>(sum, turns + pos.z * R + r);
  }
  ((device float4*)(out + (pos.z * H + pos.y) * DH))[pos.x] = sum;
}
