// Metal on the CPU executor: simdgroup and threadgroup functions on top of runtime.cpp.
#pragma once
#include "core.h"
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MSL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

extern "C" {
// All 32 lanes meet: each hands in `size` bytes and receives those of all.
void msl_exchange(const void* in, void* all, unsigned size, const char* what, const char* file, int line);
void msl_barrier(unsigned flags, bool whole, const char* file, int line);
void* msl_threadgroup(unsigned id, const char* name, unsigned long size);
unsigned msl_lane();
void msl_fault(const char* what, long value, const char* file, int line);
}

namespace metal {
template <class A> using msl_v = msl_value_t<A>;
template <class A> struct msl_lanes {
  msl_v<A> value[32];
  msl_lanes(const A& a, const char* what, const char* file, int line) {
    static_assert(sizeof(value[0]) <= 16, "");
    msl_v<A> mine = a;
    msl_exchange(&mine, value, sizeof mine, what, file, line);
  }
};
// sums in the order of a butterfly, as the GPUs' shuffle trees
#define MSL_REDUCE(name, ...)                                                                \
  template <class A> msl_v<A> name(const A& v, MSL_SITE) {                                   \
    msl_lanes<A> lanes(v, #name, file, line);                                                \
    for (int n = 16; n; n /= 2)                                                              \
      for (int i = 0; i < n; i++) {                                                          \
        auto a = lanes.value[i], b = lanes.value[i + n];                                     \
        lanes.value[i] = (msl_v<A>)(__VA_ARGS__);                                            \
      }                                                                                      \
    return lanes.value[0];                                                                   \
  }
MSL_REDUCE(simd_sum, a + b) MSL_REDUCE(simd_product, a * b) MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b)) MSL_REDUCE(simd_and, a & b) MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
#define MSL_SHUFFLE(name, ...)                                                               \
  template <class A> msl_v<A> name(const A& v, uint n, MSL_SITE) {                           \
    msl_lanes<A> lanes(v, #name, file, line);                                                \
    uint me = msl_lane(), from = __VA_ARGS__;                                                \
    if (from > 31) msl_fault("SHUFFLE from a lane that does not exist", from, file, line);   \
    return lanes.value[from & 31];                                                           \
  }
MSL_SHUFFLE(simd_shuffle, n) MSL_SHUFFLE(simd_broadcast, n) MSL_SHUFFLE(simd_shuffle_xor, me ^ n)
// past the end a lane keeps its own value
MSL_SHUFFLE(simd_shuffle_down, me + n < 32 ? me + n : me) MSL_SHUFFLE(simd_shuffle_up, me < n ? me : me - n)
template <class A> msl_v<A> simd_broadcast_first(const A& v, MSL_SITE) {
  return simd_broadcast(v, 0, file, line);
}
#define MSL_SCAN(name, inclusive)                                                            \
  template <class A> msl_v<A> name(const A& v, MSL_SITE) {                                   \
    msl_lanes<A> lanes(v, #name, file, line);                                                \
    msl_v<A> sum = 0;                                                                        \
    for (uint i = 0; i < msl_lane() + inclusive; i++) sum = (msl_v<A>)(sum + lanes.value[i]); \
    return sum;                                                                              \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 1) MSL_SCAN(simd_prefix_exclusive_sum, 0)
inline bool simd_all(bool v, MSL_SITE) { return simd_and((int)v, file, line); }
inline bool simd_any(bool v, MSL_SITE) { return simd_or((int)v, file, line); }
inline simd_vote simd_ballot(bool v, MSL_SITE) {
  return simd_vote(simd_or((ulong)v << msl_lane(), file, line));
}
inline void threadgroup_barrier(mem_flags f, MSL_SITE) { msl_barrier((uint)f, true, file, line); }
inline void simdgroup_barrier(mem_flags f, MSL_SITE) { msl_barrier((uint)f, false, file, line); }
}  // namespace metal

namespace msl {
template <class T> T& threadgroup_variable(unsigned id, const char* name) {
  return *(T*)msl_threadgroup(id, name, sizeof(T));
}
struct Builtins {  // as `Builtins` of runtime.cpp
  metal::uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid,
      threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  metal::uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup;
};
}  // namespace msl
