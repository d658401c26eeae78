// Metal on NVIDIA GPUs: a simdgroup is a warp of 32, a threadgroup a block.
#define METAL_FUNC __device__ inline
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
namespace metal {
// A shuffle of any type, 32 bits at a time. All lanes take part: the CPU executor verifies that.
template <class A, class F> __device__ inline auto msl_words(const A& a, F shuffle) {
  msl_value_t<A> v = a, r;
  constexpr int n = (sizeof(v) + 3) / 4;
  uint words[n] = {0};
  memcpy(words, (const void*)&v, sizeof(v));
  for (int i = 0; i < n; i++) words[i] = shuffle(words[i]);
  memcpy((void*)&r, words, sizeof(v));
  return r;
}
#define MSL_SHUFFLE(name, f)                                                                 \
  template <class A> __device__ inline auto name(const A& a, uint n) {                       \
    return msl_words(a, [=](uint word) { return f(0xffffffffu, word, n); });                 \
  }
MSL_SHUFFLE(simd_shuffle, __shfl_sync) MSL_SHUFFLE(simd_broadcast, __shfl_sync)
MSL_SHUFFLE(simd_shuffle_xor, __shfl_xor_sync) MSL_SHUFFLE(simd_shuffle_down, __shfl_down_sync)
MSL_SHUFFLE(simd_shuffle_up, __shfl_up_sync)
template <class A> __device__ inline auto simd_broadcast_first(const A& a) { return simd_shuffle(a, 0); }
#define MSL_REDUCE(name, ...)                                                                \
  template <class A> __device__ inline auto name(const A& v) {                               \
    msl_value_t<A> a = v;                                                                    \
    for (uint n = 16; n; n /= 2) {                                                           \
      auto b = simd_shuffle_xor(a, n);                                                       \
      a = (msl_value_t<A>)(__VA_ARGS__);                                                     \
    }                                                                                        \
    return a;                                                                                \
  }
MSL_REDUCE(simd_sum, a + b) MSL_REDUCE(simd_product, a * b) MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b)) MSL_REDUCE(simd_and, a & b) MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
__device__ inline uint msl_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}
template <class A> __device__ inline auto simd_prefix_inclusive_sum(const A& v) {
  msl_value_t<A> sum = v;
  for (uint n = 1; n < 32; n *= 2) {
    auto before = simd_shuffle_up(sum, n);
    if (msl_lane() >= n) sum = before + sum;
  }
  return sum;
}
template <class A> __device__ inline auto simd_prefix_exclusive_sum(const A& v) {
  auto before = simd_shuffle_up(simd_prefix_inclusive_sum(v), 1);
  return msl_lane() ? before : (msl_value_t<A>)0;
}
#if __CUDA_ARCH__ >= 800
__device__ inline uint simd_sum(uint a) { return __reduce_add_sync(0xffffffffu, a); }
#endif
__device__ inline uint popcount(uint a) { return __popc(a); }
__device__ inline uint ctz(uint a) { return a ? __ffs(a) - 1 : 32; }
__device__ inline uint clz(uint a) { return __clz(a); }
__device__ inline bool simd_all(bool v) { return __all_sync(0xffffffffu, v); }
__device__ inline bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
__device__ inline simd_vote simd_ballot(bool v) { return simd_vote(__ballot_sync(0xffffffffu, v)); }
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
}  // namespace metal
