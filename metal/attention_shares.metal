// What the keys of a query weigh in prefill: exp(score * scale - top) / total
// of those that it sees, 0 of the others, where top is the greatest of them and
// the sink, and total = exp(sink - top) + their sum.
//
// Query q sees raw keys (own + q - WINDOW, own + q], and an entry j < ready[q],
// or ids[q, j] < ready[q] where entries were SELECTED.
//
// Grid (32 n H rounded up to the threadgroup): a simdgroup owns a query's head.
// Its lanes take every 32nd key; all float, in an order of the numbers of keys.
template <bool SELECTED, typename I>
METAL_FUNC bool attention_seen(I ids, uint at, uint j, uint ready) {
  return (SELECTED ? ids[at + j] : j) < ready;
}

METAL_FUNC void attention_meet(
    float score, thread float& top, thread float& sum) {
  float highest = max(top, score);
  if (highest > -INFINITY) {  // else nothing weighs anything yet
    sum = sum * exp(top - highest) + exp(score - highest);
  }
  top = highest;
}

template <int WINDOW, bool SELECTED, typename P, typename R, typename I>
METAL_FUNC void attention_shares(
    const device float* scores,  // [n, H, A]
    const device float* others,  // [n, H, B], not read for B = 0
    P sink,                      // [H]
    R ready,                     // [n]
    I ids,                       // [n, B] of SELECTED
    device float* weights,       // [n, H, A]
    device float* more,          // [n, H, B]
    float scale,
    int own,
    uint3 sizes,  // H, A, B
    uint rows,
    uint row,
    uint lane) {
  if (row >= rows) {
    return;
  }
  uint H = sizes.x, A = sizes.y, B = sizes.z;
  uint q = row / H;
  uint end = min(A, uint(own + int(q) + 1));
  uint start = uint(max(0, own + int(q) + 1 - WINDOW));
  uint known = B > 0 ? ready[q] : 0;
  scores += row * A;
  others += row * B;
  float top = lane == 0 ? float(sink[row % H]) : -INFINITY;
  float sum = lane == 0 ? 1 : 0;
  for (uint a = start + lane; a < end; a += 32) {
    attention_meet(scores[a] * scale, top, sum);
  }
  for (uint j = lane; j < B; j += 32) {
    if (attention_seen<SELECTED>(ids, q * B, j, known)) {
      attention_meet(others[j] * scale, top, sum);
    }
  }
  float highest = simd_max(top);
  float part = 1 / simd_sum(sum * exp(top - highest));
  for (uint a = lane; a < A; a += 32) {
    bool seen = a >= start && a < end;
    float share = exp(scores[a] * scale - highest) * part;
    weights[row * A + a] = seen ? share : 0;
  }
  for (uint j = lane; j < B; j += 32) {
    bool seen = attention_seen<SELECTED>(ids, q * B, j, known);
    float share = exp(others[j] * scale - highest) * part;
    more[row * B + j] = seen ? share : 0;
  }
}
