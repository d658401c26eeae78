// Rotary embedding: pairs (2i, 2i + 1) of the last R channels of each head are
// turned by the row's rotation (backwards if INVERSE), the others copied.
//
// Grid (DH rounded up to the threadgroup, H, N): one thread owns one channel.
template <bool INVERSE, typename X, typename T>
METAL_FUNC void rope(
    X x,                // [N, H, DH]
    T turn,             // [N, R / 2] pairs: cosine, sine
    device float* out,  // [N, H, DH]
    uint DH,
    uint R,
    uint3 pos,
    uint H) {
  uint d = pos.x;
  if (d >= DH) {
    return;
  }
  uint at = (pos.z * H + pos.y) * DH + d;
  if (d < DH - R) {
    out[at] = x[at];
    return;
  }
  uint r = d - (DH - R);
  float cosine = turn[pos.z * R + r / 2 * 2];
  float sine = turn[pos.z * R + r / 2 * 2 + 1];
  bool odd = r % 2 == 1;
  float other = x[odd ? at - 1 : at + 1];
  out[at] = x[at] * cosine + other * (odd == INVERSE ? -sine : sine);
}
