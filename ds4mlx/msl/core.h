// The part of Metal's standard library that is plain C++: 16-bit floats, vectors, mathematics.
// Shared by cuda.h and by the tests' CPU executor. rewrite.py has dealt with address spaces,
// attributes and literals before; no macro here takes a word of Metal's.
#ifdef __CUDACC__
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace metal { namespace mstd = cuda::std; }
#define MSL_FN __host__ __device__ inline
#define MSL_MATH(f) ::f
#define MSL_RSQRT(x) ::rsqrtf(x)
#else
#include <stddef.h>
#include <stdint.h>
#include <type_traits>
namespace metal { namespace mstd = std; }
#define MSL_FN inline
#define MSL_MATH(f) __builtin_##f
#define MSL_RSQRT(x) (1.0f / __builtin_sqrtf(x))
#endif
#define MSL_CX constexpr MSL_FN
#define MSL_IF(...) mstd::enable_if_t<(__VA_ARGS__), int> = 0

namespace metal {
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t;
using ::int32_t; using ::uint32_t; using ::int64_t; using ::uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef uint64_t ulong;

template <class To, class From> MSL_FN To msl_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  To to;
#ifdef __CUDACC__
  memcpy((void*)&to, (const void*)&from, sizeof(To));
#else
  __builtin_memcpy((void*)&to, (const void*)&from, sizeof(To));
#endif
  return to;
}

// ---- 16-bit floats: half is native on a CPU; bfloat takes no float without a cast
struct msl_bfloat {
  static constexpr bool implicit = false;
#ifdef __CUDACC__
  static MSL_FN uint16_t from(float f) { return __bfloat16_as_ushort(__float2bfloat16(f)); }
  static MSL_FN float to(uint16_t b) { return __bfloat162float(__ushort_as_bfloat16(b)); }
#else
  static constexpr uint16_t from(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  static constexpr float to(uint16_t b) { return __builtin_bit_cast(float, (uint32_t)b << 16); }
#endif
};
template <class S> struct msl_native : mstd::is_arithmetic<S> {};
#ifdef __CUDACC__
struct msl_half {
  static constexpr bool implicit = true;
  static MSL_FN uint16_t from(float f) { return __half_as_ushort(__float2half(f)); }
  static MSL_FN float to(uint16_t b) { return __half2float(__ushort_as_half(b)); }
};
#else
template <> struct msl_native<_Float16> : mstd::true_type {};
#endif
template <class S> constexpr bool msl_int = mstd::is_integral<S>::value;
template <class S> constexpr bool msl_real = msl_native<S>::value && !msl_int<S>;

template <class P> struct msl_float16 {
  uint16_t bits;
  msl_float16() = default;
  template <class S, MSL_IF(msl_native<S>::value && (P::implicit || msl_int<S>))>
  MSL_CX msl_float16(S v) : bits(P::from((float)v)) {}
  template <class S, MSL_IF(msl_real<S> && !P::implicit)>
  MSL_CX explicit msl_float16(S v) : bits(P::from((float)v)) {}
  template <class Q> MSL_CX explicit msl_float16(msl_float16<Q> v) : bits(P::from((float)v)) {}
  MSL_CX operator float() const { return P::to(bits); }
  MSL_CX msl_float16 operator-() const {
    msl_float16 r = *this;
    r.bits = (uint16_t)(bits ^ 0x8000);
    return r;
  }
  template <class S> using result = mstd::conditional_t<msl_int<S>, msl_float16, float>;
#define MSL_OP(op)                                                                           \
  friend MSL_CX msl_float16 operator op(msl_float16 a, msl_float16 b) {                      \
    return msl_float16((float)a op(float) b);                                                \
  }                                                                                          \
  template <class S, MSL_IF(msl_native<S>::value)>                                           \
  friend MSL_CX result<S> operator op(msl_float16 a, S b) {                                  \
    return result<S>((float)a op(float) b);                                                  \
  }                                                                                          \
  template <class S, MSL_IF(msl_native<S>::value)>                                           \
  friend MSL_CX result<S> operator op(S a, msl_float16 b) {                                  \
    return result<S>((float)a op(float) b);                                                  \
  }                                                                                          \
  template <class S> MSL_FN msl_float16& operator op##=(S b) {                               \
    return *this = msl_float16((float)*this op(float) b);                                    \
  }
  MSL_OP(+) MSL_OP(-) MSL_OP(*) MSL_OP(/)
#undef MSL_OP
#define MSL_OP(op)                                                                              \
  friend MSL_CX bool operator op(msl_float16 a, msl_float16 b) { return (float)a op(float) b; } \
  template <class S, MSL_IF(msl_native<S>::value)>                                              \
  friend MSL_CX bool operator op(msl_float16 a, S b) { return (float)a op(float) b; }           \
  template <class S, MSL_IF(msl_native<S>::value)>                                              \
  friend MSL_CX bool operator op(S a, msl_float16 b) { return (float)a op(float) b; }
  MSL_OP(==) MSL_OP(!=) MSL_OP(<) MSL_OP(>) MSL_OP(<=) MSL_OP(>=)
#undef MSL_OP
};
#ifdef __CUDACC__
typedef msl_float16<msl_half> half;
#else
typedef _Float16 half;
#endif
typedef msl_float16<msl_bfloat> bfloat;

// ---- traits
using mstd::conditional_t; using mstd::enable_if_t; using mstd::is_same_v; using mstd::is_integral_v;
using mstd::is_unsigned_v; using mstd::make_unsigned_t; using mstd::remove_cv_t;
using mstd::remove_reference_t; using mstd::remove_pointer_t; using mstd::decay_t;
template <class T>
constexpr bool is_floating_point_v =
    mstd::is_floating_point<T>::value || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;

// ---- vectors
template <class T, int N> struct vec;
template <class T, int N> MSL_FN void msl_copy(T (&to)[N], const T (&from)[N]) {
#ifdef __CUDACC__  // one load or store, not one an element
  constexpr size_t size = sizeof(to);
  if constexpr (size == 4) *(unsigned*)to = *(const unsigned*)from;
  else if constexpr (size == 8) *(::uint2*)to = *(const ::uint2*)from;
  else if constexpr (size == 16) *(::uint4*)to = *(const ::uint4*)from;
  else
#endif
  for (int i = 0; i < N; i++) to[i] = from[i];
}
template <class V, class T, int N, int... I> struct msl_swizzle {  // in a union over the vector
  T d[N];
  msl_swizzle() = default;
  msl_swizzle(const msl_swizzle&) = default;
  MSL_CX operator V() const { return V(d[I]...); }
  MSL_FN msl_swizzle& operator=(const V& v) {
    V t = v;
    int k = 0;
    ((d[I] = t.e[k++]), ...);
    return *this;
  }
  MSL_FN msl_swizzle& operator=(const msl_swizzle& o) { return *this = (V)o; }
  template <class S> MSL_FN msl_swizzle& operator+=(const S& s) { return *this = (V)*this + s; }
  template <class S> MSL_FN msl_swizzle& operator*=(const S& s) { return *this = (V)*this * s; }
};
#define MSL_BINARY(op)                                                                     \
  friend MSL_FN vec operator op(const vec& a, const vec& b) {                              \
    vec r;                                                                                 \
    for (int i = 0; i < N; i++) r.e[i] = (T)(a.e[i] op b.e[i]);                            \
    return r;                                                                              \
  }                                                                                        \
  MSL_FN vec& operator op##=(const vec& b) { return *this = *this op b; }
#define MSL_COMPARE(op)                                                                    \
  friend MSL_FN vec<bool, N> operator op(const vec& a, const vec& b) {                     \
    vec<bool, N> r;                                                                        \
    for (int i = 0; i < N; i++) r.e[i] = a.e[i] op b.e[i];                                 \
    return r;                                                                              \
  }
#define MSL_UNARY(op, R)                                                                   \
  friend MSL_FN R operator op(const vec& a) {                                              \
    R r;                                                                                   \
    for (int i = 0; i < N; i++) r.e[i] = op a.e[i];                                        \
    return r;                                                                              \
  }
#define MSL_VECTOR                                                                         \
  vec() = default;                                                                         \
  vec(const vec&) = default;                                                               \
  MSL_FN vec& operator=(const vec& o) {                                                    \
    msl_copy(e, o.e);                                                                      \
    return *this;                                                                          \
  }                                                                                        \
  template <class U, MSL_IF(!is_same_v<U, T>)> MSL_FN explicit vec(const vec<U, N>& o) {   \
    for (int i = 0; i < N; i++) e[i] = (T)o.e[i];                                          \
  }                                                                                        \
  template <class U, int M, int... I, MSL_IF(!is_same_v<U, T>)>                            \
  MSL_FN explicit vec(const msl_swizzle<vec<U, N>, U, M, I...>& s) : vec((vec<U, N>)s) {}  \
  MSL_FN T& operator[](int i) { return e[i]; }                                             \
  MSL_FN const T& operator[](int i) const { return e[i]; }                                 \
  MSL_BINARY(+) MSL_BINARY(-) MSL_BINARY(*) MSL_BINARY(/) MSL_BINARY(%) MSL_BINARY(&)      \
  MSL_BINARY(|) MSL_BINARY(^) MSL_BINARY(<<) MSL_BINARY(>>)                                \
  MSL_COMPARE(==) MSL_COMPARE(!=) MSL_COMPARE(<) MSL_COMPARE(>) MSL_COMPARE(<=) MSL_COMPARE(>=) \
  MSL_UNARY(-, vec) MSL_UNARY(~, vec) MSL_UNARY(!, vec_bool)
#define SW2(M, X, Y, a, b) msl_swizzle<vec<T, 2>, T, M, a, b> X##Y;
#define SW3(M, X, Y, Z, a, b, c) msl_swizzle<vec<T, 3>, T, M, a, b, c> X##Y##Z;
#define SW4(X, Y, Z, W, a, b, c, d) msl_swizzle<vec<T, 4>, T, 4, a, b, c, d> X##Y##Z##W;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  static constexpr int N = 2;
  using vec_bool = vec<bool, 2>;
  union {
    T e[2];
    struct { T x, y; };
    SW2(2, x, y, 0, 1) SW2(2, y, x, 1, 0) SW2(2, x, x, 0, 0) SW2(2, y, y, 1, 1)
  };
  MSL_CX vec(T s) : e{s, s} {}
  MSL_CX vec(T a, T b) : e{a, b} {}
  MSL_VECTOR
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  static constexpr int N = 3;
  using vec_bool = vec<bool, 3>;
  union {
    T e[3];
    struct { T x, y, z; };
    SW2(3, x, y, 0, 1) SW2(3, y, z, 1, 2) SW2(3, x, z, 0, 2) SW3(3, z, y, x, 2, 1, 0)
  };
  MSL_CX vec(T s) : e{s, s, s} {}
  MSL_CX vec(T a, T b, T c) : e{a, b, c} {}
  MSL_CX vec(const vec<T, 2>& a, T b) : e{a.e[0], a.e[1], b} {}
  MSL_VECTOR
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  static constexpr int N = 4;
  using vec_bool = vec<bool, 4>;
  union {
    T e[4];
    struct { T x, y, z, w; };
    SW2(4, x, y, 0, 1) SW2(4, z, w, 2, 3) SW2(4, x, z, 0, 2) SW2(4, y, w, 1, 3) SW2(4, y, z, 1, 2)
    SW3(4, x, y, z, 0, 1, 2) SW3(4, y, z, w, 1, 2, 3) SW4(w, z, y, x, 3, 2, 1, 0)
    SW4(y, x, w, z, 1, 0, 3, 2) SW4(z, w, x, y, 2, 3, 0, 1) SW4(x, z, y, w, 0, 2, 1, 3)
  };
  MSL_CX vec(T s) : e{s, s, s, s} {}
  MSL_CX vec(T a, T b, T c, T d) : e{a, b, c, d} {}
  MSL_CX vec(const vec<T, 2>& a, T b, T c) : e{a.e[0], a.e[1], b, c} {}
  MSL_CX vec(const vec<T, 2>& a, const vec<T, 2>& b) : e{a.e[0], a.e[1], b.e[0], b.e[1]} {}
  MSL_CX vec(const vec<T, 3>& a, T b) : e{a.e[0], a.e[1], a.e[2], b} {}
  MSL_VECTOR
};
#undef SW2
#undef SW3
#undef SW4
#define MSL_TYPES(X)                                                                         \
  X(bool, bool) X(char, int8_t) X(uchar, uchar) X(short, short) X(ushort, ushort) X(int, int) \
  X(uint, uint) X(long, int64_t) X(ulong, ulong) X(half, half) X(float, float) X(bfloat, bfloat)
#define MSL_NAMES(NAME, T)                                                                   \
  typedef vec<T, 2> NAME##2; typedef vec<T, 3> NAME##3; typedef vec<T, 4> NAME##4;
MSL_TYPES(MSL_NAMES)
#undef MSL_NAMES

// what a value is without swizzles: `vector` says whether it has elements
template <class T> struct msl_value { using type = T; static constexpr bool vector = false; };
template <class T, int N> struct msl_value<vec<T, N>> {
  using type = vec<T, N>;
  static constexpr bool vector = true;
};
template <class V, class T, int N, int... I>
struct msl_value<msl_swizzle<V, T, N, I...>> : msl_value<V> {};
template <class T> using msl_value_t = typename msl_value<T>::type;
template <class T> constexpr bool msl_vector = msl_value<T>::vector;
template <class A, class B> using msl_wider_t = conditional_t<msl_vector<A>, msl_value_t<A>, msl_value_t<B>>;
template <class A, class B> struct msl_common { using type = decltype(A() + B()); };
template <class A> struct msl_common<A, A> { using type = A; };
template <class A, class B> using msl_common_t = typename msl_common<A, B>::type;

template <class To, class From> MSL_FN To as_type(const From& from) {
  return msl_bits<To>((msl_value_t<From>)from);
}

// ---- mathematics: 16-bit floats go through float and round once
#define MSL_MAP1(name, R)                                                                    \
  template <class A, MSL_IF(msl_vector<A>)> MSL_FN auto name(const A& a_) {                  \
    msl_value_t<A> a = a_;                                                                   \
    R r;                                                                                     \
    for (int i = 0; i < a.N; i++) r.e[i] = name(a.e[i]);                                     \
    return r;                                                                                \
  }
#define MSL_REAL1(name, ...)                                                                 \
  template <class A, MSL_IF(is_floating_point_v<A>)> MSL_FN A name(A a) {                    \
    float x = (float)a;                                                                      \
    return (A)(__VA_ARGS__);                                                                 \
  }                                                                                          \
  MSL_MAP1(name, decltype(a))
MSL_REAL1(exp, MSL_MATH(expf)(x)) MSL_REAL1(exp2, MSL_MATH(exp2f)(x)) MSL_REAL1(log, MSL_MATH(logf)(x))
MSL_REAL1(log2, MSL_MATH(log2f)(x)) MSL_REAL1(sqrt, MSL_MATH(sqrtf)(x))
MSL_REAL1(rsqrt, MSL_RSQRT(x)) MSL_REAL1(sin, MSL_MATH(sinf)(x))
MSL_REAL1(cos, MSL_MATH(cosf)(x)) MSL_REAL1(tanh, MSL_MATH(tanhf)(x))
MSL_REAL1(floor, MSL_MATH(floorf)(x)) MSL_REAL1(ceil, MSL_MATH(ceilf)(x))
MSL_REAL1(trunc, MSL_MATH(truncf)(x)) MSL_REAL1(round, MSL_MATH(roundf)(x))
MSL_REAL1(rint, MSL_MATH(rintf)(x)) MSL_REAL1(fabs, MSL_MATH(fabsf)(x))
MSL_REAL1(saturate, x > 0 ? x < 1 ? x : 1.0f : 0.0f)
MSL_REAL1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
#define MSL_PREDICATE(name, ...)                                                             \
  template <class A, MSL_IF(is_floating_point_v<A>)> MSL_FN bool name(A a) {                 \
    float x = (float)a;                                                                      \
    return __VA_ARGS__;                                                                      \
  }                                                                                          \
  MSL_MAP1(name, typename msl_value_t<A>::vec_bool)
MSL_PREDICATE(isnan, x != x) MSL_PREDICATE(isfinite, (msl_bits<uint>(x) & 0x7f800000u) != 0x7f800000u)
MSL_PREDICATE(isinf, (msl_bits<uint>(x) & 0x7fffffffu) == 0x7f800000u)
#define MSL_MAP2(name)                                                                       \
  template <class A, class B, MSL_IF(msl_vector<A> || msl_vector<B>)>                        \
  MSL_FN auto name(const A& a_, const B& b_) {                                               \
    msl_wider_t<A, B> a = a_, b = b_, r;                                                     \
    for (int i = 0; i < a.N; i++) r.e[i] = name(a.e[i], b.e[i]);                             \
    return r;                                                                                \
  }
#define MSL_REAL2(name, f)                                                                   \
  template <class A, class B, MSL_IF(is_floating_point_v<msl_common_t<A, B>>)>               \
  MSL_FN auto name(A a, B b) { return (msl_common_t<A, B>)MSL_MATH(f)((float)a, (float)b); } \
  MSL_MAP2(name)
MSL_REAL2(pow, powf) MSL_REAL2(fmod, fmodf) MSL_REAL2(copysign, copysignf) MSL_REAL2(fmin, fminf)
MSL_REAL2(fmax, fmaxf)
#define MSL_ANY2(name, op)                                                                   \
  template <class A, class B, MSL_IF(is_arithmetic_v<A> && is_arithmetic_v<B>)>              \
  MSL_FN auto name(A a_, B b_) {                                                             \
    msl_common_t<A, B> a = a_, b = b_;  /* a number before a NaN */                          \
    if constexpr (is_same_v<decltype(a), float>) return MSL_MATH(f##name##f)(a, b);          \
    else return a != a ? b : b op a ? b : a;                                                 \
  }                                                                                          \
  MSL_MAP2(name)
MSL_ANY2(min, <) MSL_ANY2(max, >)
template <class A, MSL_IF(is_arithmetic_v<A>)> MSL_FN A abs(A a) {
  if constexpr (is_floating_point_v<A>) return fabs(a);
  else if constexpr (is_unsigned_v<A>) return a;
  else return a < 0 ? (A)-a : a;
}
MSL_MAP1(abs, decltype(a))
template <class A, class B, class C> MSL_FN auto clamp(const A& x, const B& low, const C& high) {
  return min(max(x, low), high);
}
template <class A, class B, class C, MSL_IF(is_arithmetic_v<A> && is_arithmetic_v<B>)>
MSL_FN auto fma(A a, B b, C c) {
  return (msl_common_t<msl_common_t<A, B>, C>)MSL_MATH(fmaf)((float)a, (float)b, (float)c);
}
template <class A, class B, class C, MSL_IF(msl_vector<A> || msl_vector<B>)>
MSL_FN auto fma(const A& a_, const B& b_, const C& c_) {
  msl_wider_t<A, B> a = a_, b = b_, c = c_, r;
  for (int i = 0; i < a.N; i++) r.e[i] = fma(a.e[i], b.e[i], c.e[i]);
  return r;
}
template <class A, class B, class C> MSL_FN auto mix(const A& a, const B& b, const C& t) {
  return a + (b - a) * t;
}
template <class A, MSL_IF(!msl_vector<A>)> MSL_FN A select(A a, A b, bool second) {
  return second ? b : a;
}
template <class T, int N> MSL_FN vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> second) {
  for (int i = 0; i < N; i++) a.e[i] = second.e[i] ? b.e[i] : a.e[i];
  return a;
}
template <int N> MSL_FN bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= v.e[i];
  return r;
}
template <int N> MSL_FN bool all(vec<bool, N> v) { return !any(!v); }
template <class A, class B> MSL_FN auto dot(const A& a_, const B& b_) {
  msl_wider_t<A, B> a = a_, b = b_;
  auto sum = a.e[0] * b.e[0];
  for (int i = 1; i < a.N; i++) sum = sum + a.e[i] * b.e[i];
  return sum;
}
template <class A> MSL_FN A ldexp(A a, int n) { return (A)MSL_MATH(ldexpf)((float)a, n); }
template <class A> MSL_FN A popcount(A a) {
  int n = 0;
  for (auto u = (make_unsigned_t<A>)a; u; u &= u - 1) n++;
  return (A)n;
}
template <class A> MSL_FN A clz(A a) {
  int n = 8 * sizeof(A);
  for (auto u = (make_unsigned_t<A>)a; u; u >>= 1) n--;
  return (A)n;
}
template <class A> MSL_FN A ctz(A a) { return popcount((A)((a & -a) - 1)); }
#define MSL_FUNCTIONS(X)                                                                     \
  X(exp) X(exp2) X(log) X(log2) X(sqrt) X(rsqrt) X(sin) X(cos) X(tanh) X(floor) X(ceil)      \
  X(trunc) X(round) X(rint) X(fabs) X(saturate) X(sign) X(isnan) X(isfinite) X(isinf) X(pow) \
  X(fmod) X(copysign) X(fmin) X(fmax) X(min) X(max) X(abs) X(clamp) X(fma) X(ldexp)
#define MSL_USE(f) using metal::f;
namespace fast { MSL_FUNCTIONS(MSL_USE) }
namespace precise { MSL_FUNCTIONS(MSL_USE) }

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
MSL_CX mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
struct simd_vote {
  typedef ulong vote_t;
  vote_t lanes;
  MSL_CX explicit simd_vote(vote_t v) : lanes(v) {}
  MSL_CX explicit operator vote_t() const { return lanes; }
};
}  // namespace metal
#define M_PI_F 3.14159265358979323846f
