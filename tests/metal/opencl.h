// Metal's names as declarations in C++ for OpenCL: enough for clang to judge address spaces.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
  operator float() const;
};
typedef half float16_t;
typedef bfloat bfloat16_t;
// MSL builds a vector by T4(...), OpenCL by (T4)(...): the lint writes make_T4(...)
#define VECTORS(T)                               \
  template <class... A> T##2 make_##T##2(A...);  \
  template <class... A> T##3 make_##T##3(A...);  \
  template <class... A> T##4 make_##T##4(A...);
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint)
VECTORS(long) VECTORS(ulong) VECTORS(half) VECTORS(float)
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class To, class From> To as_type(From);
#define METAL_FUNC inline
#define M_PI_F 3.14159265358979323846f
enum class mem_flags : uint { mem_none, mem_device, mem_threadgroup };
mem_flags operator|(mem_flags, mem_flags);
#define LANES(name) template <class T> T name(T);
LANES(simd_sum) LANES(simd_product) LANES(simd_max) LANES(simd_min) LANES(simd_and) LANES(simd_or)
LANES(simd_xor) LANES(simd_broadcast_first) LANES(simd_prefix_inclusive_sum)
LANES(simd_prefix_exclusive_sum)
#define LANE(name) template <class T> T name(T, ushort);
LANE(simd_shuffle) LANE(simd_shuffle_xor) LANE(simd_shuffle_up) LANE(simd_shuffle_down)
LANE(simd_broadcast)
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float saturate(float);
