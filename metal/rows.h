// A matrix from its element i on, which begins a row.

template <typename T>
METAL_FUNC dense<T> rows(dense<T> w, uint i) {
  return {w.data + i};
}

METAL_FUNC q8_0 rows(q8_0 w, uint i) {
  return {w.codes + i / 4, w.scales + i / 32};
}

METAL_FUNC q4_0 rows(q4_0 w, uint i) {
  return {w.codes + i / 8, w.scales + i / 32};
}

METAL_FUNC mxfp4 rows(mxfp4 w, uint i) {
  return {w.codes + i / 8, w.scales + i / 32};
}

METAL_FUNC q4_k rows(q4_k w, uint i) {
  return {w.codes + i / 8, w.scales + i / 256 * 12, w.d + i / 256 * 2};
}

METAL_FUNC q5_k rows(q5_k w, uint i) {
  return {
      w.codes + i / 8,
      w.high + i / 32,
      w.scales + i / 256 * 12,
      w.d + i / 256 * 2};
}

METAL_FUNC q6_k rows(q6_k w, uint i) {
  return {w.codes + i / 8, w.high + i / 16, w.scales + i / 16, w.d + i / 256};
}

METAL_FUNC q2_k rows(q2_k w, uint i) {
  return {w.codes + i / 16, w.scales + i / 16, w.d + i / 256 * 2};
}

METAL_FUNC iq2_xxs rows(iq2_xxs w, uint i) {
  return {w.grid + i / 8, w.signs + i / 32, w.d + i / 256, w.table};
}
