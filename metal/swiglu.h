// The gate, limited from above only, and what it gates, limited on both sides.
METAL_FUNC float swiglu(float gate, float up, float limit) {
  // Comparisons, where min and clamp would hide a NaN.
  gate = limit < gate ? limit : gate;
  up = limit < up ? limit : up < -limit ? -limit : up;
  return gate / (1 + exp(-gate)) * up;
}
