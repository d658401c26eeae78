// Attention with a sink over a list of keys, which are also the values,
//   out[n, h] = sum_k p_k key_k / sum_k p_k,
//   p_k = exp(q[n, h] . key_k / sqrt(DH)),
// where the sink of the head adds its exp to the denominator alone.
//
// The keys of query n are a stretch of `raw`, then the first entries or those
// listed in `ids`. Tiles of 32 keys form at most 32 splits; which keys a split
// holds depends on the length of the query's own list. One simdgroup owns HEADS
// heads of a split, a lane a 32nd of the channels: it scores a tile (lane k
// keeps the score of key k), then adds the weighted keys. All float. Sums run
// over a lane's channels, then the simdgroup; over keys upwards, then splits.
constant constexpr uint TILE = 32;
constant constexpr uint MAX_SPLITS = 32;  // a lane each in the merge

// Where query n finds its keys, as ops/attention.py writes it.
struct attention_keys {
  int first;    // its first row of raw
  int window;   // how many of raw
  int entries;  // how many entries
  int ids;      // where its ids start; -1: it takes the first entries
  int part;     // its first split among those of the block
};

template <typename R>
METAL_FUNC attention_keys attention_row(R rows, uint n) {
  rows += 5 * n;
  return {rows[0], rows[1], rows[2], rows[3], rows[4]};
}

METAL_FUNC uint attention_split_size(uint keys) {
  uint tiles = (keys + TILE - 1) / TILE;
  return (tiles + MAX_SPLITS - 1) / MAX_SPLITS * TILE;
}

template <typename I>
METAL_FUNC const device float* attention_key(
    attention_keys list,
    const device float* raw,
    const device float* entries,
    I ids,
    uint k,
    int DH) {
  if (int(k) < list.window) {
    return raw + (list.first + k) * DH;
  }
  k -= list.window;
  return entries + (list.ids < 0 ? k : ids[list.ids + k]) * DH;
}

// Grid (simdgroups of HEADS heads, SPLITS): all splits of the block's queries.
template <int DH, int HEADS, typename R, typename I>
METAL_FUNC void attention_part(
    const device float* q,        // [N, H, DH]
    const device float* raw,      // [S, DH]
    const device float* entries,  // [C, DH]
    I ids,                        // entries that queries selected
    R rows,                       // attention_keys [N]
    device float* part,           // [SPLITS, H, DH], relative to its top
    device float* stat,           // [SPLITS, H, 2]: top score, sum of exp
    int N,
    int H,
    int split,
    uint sg,
    uint lane) {
  int head = sg * HEADS;
  if (head >= H) {
    return;
  }
  int n = 0;
  while (n + 1 < N && attention_row(rows, n + 1).part <= split) {
    n++;
  }
  attention_keys list = attention_row(rows, n);
  uint keys = list.window + list.entries;
  uint size = attention_split_size(keys);
  uint first = (split - list.part) * size;
  uint last = min(keys, first + size);

  constexpr int J = DH / 128;
  float4 query[HEADS][J], sum[HEADS][J];
  float top[HEADS], total[HEADS];
  for (int h = 0; h < HEADS; h++) {
    int own = n * H + min(head + h, H - 1);
    const device float4* from = (const device float4*)(q + own * DH);
    for (int j = 0; j < J; j++) {
      query[h][j] = from[32 * j + lane] * rsqrt(float(DH));
      sum[h][j] = 0;
    }
    top[h] = -INFINITY;
    total[h] = 0;
  }

  for (uint tile = first; tile < last; tile += TILE) {
    vec<float, HEADS> weight = 0;
    for (uint t = tile; t < last && t < tile + TILE; t += 4) {
      float4 scores[HEADS];
      for (uint u = 0; u < 4; u++) {
        // Past the end the last key stands in, with weight 0.
        const device float4* key = (const device float4*)attention_key(
            list, raw, entries, ids, min(t + u, last - 1), DH);
        float score[HEADS] = {};
        for (int j = 0; j < J; j++) {
          float4 channels = key[32 * j + lane];
          for (int h = 0; h < HEADS; h++) {
            score[h] += dot(query[h][j], channels);
          }
        }
        for (int h = 0; h < HEADS; h++) {
          scores[h][u] = score[h];
        }
      }
      for (int h = 0; h < HEADS; h++) {
        scores[h] = simd_sum(scores[h]);
        for (uint u = 0; u < 4; u++) {
          weight[h] = tile + lane == t + u ? scores[h][u] : weight[h];
        }
      }
    }
    for (int h = 0; h < HEADS; h++) {
      float score = tile + lane < last ? weight[h] : -INFINITY;
      float before = top[h];
      top[h] = max(before, simd_max(score));
      weight[h] = exp(score - top[h]);
      float fade = exp(before - top[h]);
      total[h] = total[h] * fade + simd_sum(weight[h]);
      for (int j = 0; j < J; j++) {
        sum[h][j] *= fade;
      }
    }
    for (uint t = tile; t < last && t < tile + TILE; t += 4) {
      for (uint u = 0; u < 4; u++) {
        const device float4* key = (const device float4*)attention_key(
            list, raw, entries, ids, min(t + u, last - 1), DH);
        vec<float, HEADS> share = simd_broadcast(weight, t + u - tile);
        for (int j = 0; j < J; j++) {
          float4 channels = key[32 * j + lane];
          for (int h = 0; h < HEADS; h++) {
            sum[h][j] += share[h] * channels;
          }
        }
      }
    }
  }

  for (int h = 0; h < HEADS && head + h < H; h++) {
    uint own = split * H + head + h;
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
template <int DH, typename T, typename R, typename S>
METAL_FUNC void attention_merge(
    const device float* part,
    T stat,
    R rows,
    S sink,             // [H]
    device float* out,  // [N, H, DH]
    uint H,
    uint3 pos,
    uint lane) {
  attention_keys list = attention_row(rows, pos.z);
  uint keys = list.window + list.entries;
  uint size = attention_split_size(keys);
  uint splits = (keys + size - 1) / size;
  uint own = list.part * H + pos.y;
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
  ((device float4*)(out + (pos.z * H + pos.y) * DH))[pos.x] = sum / total;
}
