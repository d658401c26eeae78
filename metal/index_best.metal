// The entries with the K best of a row's first `ready` scores, in ascending
// order; of equal scores the lowest entries are taken, a NaN counts as minus
// infinity. Where K or fewer are ready, all of them, then NONE.
//
// A threadgroup chooses among the entries of a chunk; where a row has several
// chunks, another launch chooses among their choices. Grid (512, chunks, N): a
// simdgroup owns a stretch, a lane every 32nd score of it, as ordered bits. The
// K-th best is found bit by bit from the top, by how many are no less. Then
// each simdgroup writes what it holds of the chosen.
constant constexpr uint SIMDGROUPS = 16;
constant constexpr uint SCORES = 32;                       // of a lane
constant constexpr uint EIGHT = 8;                         // at a time
constant constexpr uint CHUNK = 32 * SIMDGROUPS * SCORES;  // of a threadgroup
constant constexpr uint NONE = 0xffffffff;

METAL_FUNC uint index_best_ballot(bool vote) {
  return uint(simd_vote::vote_t(simd_ballot(vote)));
}

// Larger for a better score. Both zeros are one score.
METAL_FUNC uint index_best_key(float score) {
  score = max(score, -INFINITY);
  uint bits = score == 0 ? 0 : as_type<uint>(score);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

struct index_best_list {
  const device float* scores;
  const device uint* ids;
  uint first;
  uint count;
  bool listed;  // the entries are those of `ids`, not `first` and on
};

METAL_FUNC uint index_best_entry(index_best_list list, uint i) {
  return list.listed ? list.ids[i] : list.first + i;
}

// The keys of some of a lane's entries, every 32nd from i on.
METAL_FUNC void index_best_read(
    index_best_list list, uint i, uint some, thread uint* keys) {
  uint entries[EIGHT];
  for (uint j = 0; j < EIGHT; j++) {
    bool there = j < some && i + 32 * j < list.count;
    entries[j] = there ? index_best_entry(list, i + 32 * j) : NONE;
  }
  for (uint j = 0; j < EIGHT; j++) {
    if (entries[j] != NONE) {
      keys[j] = index_best_key(list.scores[entries[j]]);
    }
  }
}

METAL_FUNC void index_best_choose(
    index_best_list list,
    device uint* out,          // [K]
    threadgroup uint* counts,  // [2, SIMDGROUPS]: bits in turn
    threadgroup uint2* held,   // [SIMDGROUPS]
    uint K,
    uint sg,
    uint lane) {
  if (list.count <= K) {
    for (uint i = 32 * sg + lane; i < K; i += 32 * SIMDGROUPS) {
      out[i] = i < list.count ? index_best_entry(list, i) : NONE;
    }
    return;
  }
  uint used = (list.count + 32 * SIMDGROUPS - 1) / (32 * SIMDGROUPS);
  uint start = sg * used * 32 + lane;
  uint keys[SCORES];
#pragma unroll
  for (uint j = 0; j < SCORES; j += EIGHT) {
    for (uint i = j; i < j + EIGHT; i++) {
      keys[i] = 0;  // which no score is
    }
    if (j < used) {
      index_best_read(list, start + 32 * j, min(EIGHT, used - j), keys + j);
    }
  }

  uint bound = 0;  // the K-th best, as far as it is known
  for (uint bit = 1u << 31; bit > 0; bit /= 2) {
    uint trial = bound | bit;
    uint some[4] = {};  // in four parts, how many keys are not below it
#pragma unroll
    for (uint j = 0; j < SCORES; j += EIGHT) {
      if (j < used) {
        for (uint i = j; i < j + EIGHT; i++) {
          some[i % 4] += keys[i] >= trial;
        }
      }
    }
    // Of two sets of counts one is written while the other may still be read.
    threadgroup uint* now = counts + (ctz(bit) % 2) * SIMDGROUPS;
    uint count = simd_sum(some[0] + some[1] + some[2] + some[3]);
    if (lane == 0) {
      now[sg] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    count = simd_sum(lane < SIMDGROUPS ? now[lane] : 0);
    bound = count >= K ? trial : bound;
    if (count == K) {
      break;
    }
  }

  uint2 own = 0;  // keys above the bound, and at it
#pragma unroll
  for (uint j = 0; j < SCORES; j += EIGHT) {
    if (j < used) {
      for (uint i = j; i < j + EIGHT; i++) {
        own += uint2(keys[i] > bound, keys[i] == bound);
      }
    }
  }
  own = uint2(simd_sum(own.x), simd_sum(own.y));
  if (lane == 0) {
    held[sg] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint2 all = lane < SIMDGROUPS ? held[lane] : uint2(0);
  uint need = K - simd_sum(all.x);  // keys to take of those at the bound
  uint above = simd_sum(lane < sg ? all.x : 0);
  uint equal = simd_sum(lane < sg ? all.y : 0);
  uint below = (1u << lane) - 1;
#pragma unroll
  for (uint j = 0; j < SCORES; j++) {
    if (j >= used) {
      break;
    }
    uint mores = index_best_ballot(keys[j] > bound);
    uint sames = index_best_ballot(keys[j] == bound);
    uint equals = equal + popcount(sames & below);
    if (keys[j] > bound || (keys[j] == bound && equals < need)) {
      out[above + popcount(mores & below) + min(equals, need)] =
          index_best_entry(list, start + 32 * j);
    }
    above += popcount(mores);
    equal += popcount(sames);
  }
}

template <typename L>
METAL_FUNC void index_best(
    const device float* scores,  // [N, C]
    L ready,                     // [N]
    device uint* out,            // [N, chunks, K]
    threadgroup uint* counts,
    threadgroup uint2* held,
    uint C,
    uint K,
    uint2 group,  // chunk, N: which
    uint chunks,
    uint sg,
    uint lane) {
  uint limit = ready[group.y];
  uint first = group.x * CHUNK;
  if (group.x > 0 && first >= limit) {
    return;
  }
  uint count = min(limit - first, CHUNK);
  index_best_list list = {scores + group.y * C, nullptr, first, count, false};
  out += (group.y * chunks + group.x) * K;
  index_best_choose(list, out, counts, held, K, sg, lane);
}

// Of the choices of a row's chunks, those with the K best scores.
template <typename L>
METAL_FUNC void index_best_of(
    const device float* scores,  // [N, C]
    L ready,                     // [N]
    const device uint* ids,      // [N, chunks, K]
    device uint* out,            // [N, K]
    threadgroup uint* counts,
    threadgroup uint2* held,
    uint C,
    uint K,
    uint n,
    uint chunks,
    uint sg,
    uint lane) {
  uint count = max(1u, (uint(ready[n]) + CHUNK - 1) / CHUNK) * K;
  index_best_list list = {scores + n * C, ids + n * chunks * K, 0, count, true};
  index_best_choose(list, out + n * K, counts, held, K, sg, lane);
}
