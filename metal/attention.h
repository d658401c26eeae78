// Of attention.metal: what a query sees, where that lies, and its rotation.
constant constexpr int FEW = 4;      // also the simdgroups of a threadgroup
constant constexpr int SPLITS = 32;  // a lane each in the merge
constant constexpr int DEEP = SPLITS / FEW;

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
  int keys = list.window + list.entries;
  return max(2, (keys + FEW * SPLITS - 1) / (FEW * SPLITS)) * FEW;
}

struct attention_rows {
  const device float* ring;     // [CAP, STRIDE]
  const device float* entries;  // [C, DH]
  int CAP;
  int STRIDE;
};

// Which row of the ring or the entries key k is.
template <typename I>
METAL_FUNC uint
attention_place(attention_keys list, attention_rows from, I ids, int k) {
  if (k < list.window) {
    return (list.first + k) % from.CAP;
  }
  k -= list.window;
  return list.listed ? uint(ids[k]) : uint(k);
}

METAL_FUNC const device float4* attention_key(
    attention_keys list, attention_rows from, int k, uint place, int DH) {
  const device float* row = k < list.window ? from.ring : from.entries;
  int stride = k < list.window ? from.STRIDE : DH;
  return (const device float4*)(row + ulong(place) * stride);
}

// Rotate pairs by the cosines and sines from `turn` on, back if INVERSE.
template <bool INVERSE, typename T>
METAL_FUNC float4 attention_turn(float4 v, T turn) {
  float2 sines = float2(turn[1], turn[3]);
  sines = INVERSE ? -sines : sines;
  return v * float4(turn[0], turn[0], turn[2], turn[2]) +
         float4(-v.y, v.x, -v.w, v.z) * float4(sines.xx, sines.yy);
}

// Of the step from k on, the simdgroup's key. Past the end the last stands in.
template <int J, typename I>
METAL_FUNC void attention_read(
    attention_keys list,
    attention_rows from,
    I ids,
    int first,
    int k,
    int last,
    thread uint& place,
    thread float4* key,
    uint sg,
    uint lane) {
  int at = (k - first) % 32;
  if (at == 0) {  // a lane finds the place of one key of 32
    place = attention_place(list, from, ids, min(k + int(lane), last - 1));
  }
  const device float4* row = attention_key(
      list,
      from,
      min(k + int(sg), last - 1),
      simd_shuffle(place, at + sg),
      128 * J);
  for (int j = 0; j < J; j++) {
    key[j] = row[32 * j + lane];
  }
}
