// The entries with the K best of a row's first `ready` scores, in ascending
// order; of equal scores the lowest entries are taken, a NaN counts as minus
// infinity. Where K or fewer are ready, all of them, then 0xffffffff.
//
// Grid (512, N): a threadgroup owns a row, a simdgroup a stretch of its
// entries. A radix select over ordered bits, five a pass from the top: a lane
// counts the keys with one of 32 digits, and the digit of the K-th best leads
// to the next pass. Then each simdgroup writes what it holds of the chosen.
constant constexpr uint SIMDGROUPS = 16;
constant constexpr uint BATCH = 4;  // scores that a lane loads at a time

METAL_FUNC uint index_best_ballot(bool vote) {
  return uint(simd_vote::vote_t(simd_ballot(vote)));
}

// Larger for a better score. Both zeros are one score.
METAL_FUNC uint index_best_key(float score) {
  score = max(score, -INFINITY);
  uint bits = score == 0 ? 0 : as_type<uint>(score);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

METAL_FUNC void index_best_keys(
    const device float* scores, thread uint* keys, uint start, uint stop) {
  for (uint j = 0; j < BATCH; j++) {
    uint i = start + 32 * j;
    keys[j] = i < stop ? index_best_key(scores[i]) : 0;
  }
}

template <typename L>
METAL_FUNC void index_best(
    const device float* scores,  // [N, C]
    L ready,                     // [N]
    device uint* out,            // [N, K]
    threadgroup uint* counts,    // [2, SIMDGROUPS, 32]: passes in turn, digits
    threadgroup uint2* held,     // [SIMDGROUPS]
    uint C,
    uint K,
    uint n,
    uint sg,
    uint lane) {
  uint limit = ready[n];
  scores += n * C;
  out += n * K;
  if (limit <= K) {
    for (uint i = 32 * sg + lane; i < K; i += 32 * SIMDGROUPS) {
      out[i] = i < limit ? i : 0xffffffff;
    }
    return;
  }
  uint share = (limit + 32 * SIMDGROUPS - 1) / (32 * SIMDGROUPS) * 32;
  uint start = sg * share;
  uint stop = min(start + share, limit);

  uint keys[BATCH];
  uint top = 32;     // bits of the K-th best not known yet
  uint prefix = 0;   // the others
  uint need = K;     // keys to take of those that start with the prefix
  uint greater = 0;  // of the simdgroup, keys that start with more
  uint equal = 0;    // of the simdgroup, keys that start with the prefix
  bool whole = false;
  for (uint pass = 0; top > 0 && !whole; pass++) {
    uint shift = top > 5 ? top - 5 : 0;
    uint count = 0;
    for (uint base = start; base < stop; base += 32 * BATCH) {
      index_best_keys(scores, keys, base + lane, stop);
      for (uint j = 0; j < BATCH; j++) {
        bool candidate = top == 32 || keys[j] >> top == prefix;
        candidate = candidate && base + 32 * j + lane < stop;
        uint same = index_best_ballot(candidate);
        if (same == 0) {
          continue;
        }
        uint digit = keys[j] >> shift & ((1 << (top - shift)) - 1);
        for (uint bit = 0; bit < 5; bit++) {
          uint set = index_best_ballot(digit >> bit & 1);
          same &= lane >> bit & 1 ? set : ~set;
        }
        count += popcount(same);
      }
    }
    // Of two sets of counts one is written while the other may still be read.
    threadgroup uint* now = counts + 32 * SIMDGROUPS * (pass % 2);
    now[32 * sg + lane] = count;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint total = 0;
    for (uint s = 0; s < SIMDGROUPS; s++) {
      total += now[32 * s + lane];
    }
    uint above = simd_sum(total) - simd_prefix_inclusive_sum(total);
    uint digit = ctz(index_best_ballot(above < need && need <= above + total));
    need -= simd_shuffle(above, digit);
    whole = need == simd_shuffle(total, digit);
    greater += simd_sum(lane > digit ? count : 0);
    equal = simd_shuffle(count, digit);
    prefix = prefix << (top - shift) | digit;
    top = shift;
  }

  if (lane == 0) {
    held[sg] = uint2(greater, equal);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint2 both = lane < SIMDGROUPS ? held[lane] : uint2(0);
  greater = simd_shuffle(simd_prefix_exclusive_sum(both.x), sg);
  equal = simd_shuffle(simd_prefix_exclusive_sum(both.y), sg);
  uint below = (1u << lane) - 1;
  for (uint base = start; base < stop; base += 32 * BATCH) {
    index_best_keys(scores, keys, base + lane, stop);
    for (uint j = 0; j < BATCH; j++) {
      uint i = base + 32 * j + lane;
      bool more = i < stop && keys[j] >> top > prefix;
      bool same = i < stop && keys[j] >> top == prefix;
      uint mores = index_best_ballot(more);
      uint sames = index_best_ballot(same);
      uint equals = equal + popcount(sames & below);
      if (more || (same && equals < need)) {
        out[greater + popcount(mores & below) + min(equals, need)] = i;
      }
      greater += popcount(mores);
      equal += popcount(sames);
    }
  }
}
