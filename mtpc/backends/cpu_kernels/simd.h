// Explicit vectors on the compiler's vector extension (GCC >= 12, Clang >= 15), any ISA.
//
// Every reduction order is written out here or in the kernels. Nothing is left to -ffast-math,
// which would let two template instances of one loop add in different orders (results must not
// depend on the number of rows) and which, at link time, makes GCC 12 switch denormals off for
// the whole process.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mtpc {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};

/// A full register of accumulators: A is float or double.
template <class A>
using Vec = typename VecOf<A>::type;

/// A register of integers as wide as A: what comparing two Vec<A> gives.
template <class A>
using Mask = typename VecOf<A>::mask;

template <class A>
inline constexpr int kLanes = kVectorBytes / sizeof(A);

/// The type in which values of type T are accumulated.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
inline constexpr A kInfinity = std::numeric_limits<A>::infinity();

// ---- Loads and stores ------------------------------------------------------------------------

/// One register of floats from 16-bit values. The intrinsics are for levels where GCC 12 does not
/// compile the portable forms to a single instruction.
#if defined(__AVX512F__)
inline Vec<float> widen(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline Vec<float> widen(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#else
inline Vec<float> widen(const Half* p) {
#if defined(__AVX__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = static_cast<float>(p[i]);
  return out;
#endif
}

/// A bfloat16 is the upper half of a float.
inline Vec<float> widen(const BFloat16* p) {
  typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
  typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
  Narrow bits;
  std::memcpy(&bits, p, sizeof(bits));
  return reinterpret_cast<Vec<float>>(__builtin_convertvector(bits, Wide) << 16);
}
#endif

/// A register of integers from bytes, signed or not. Without intrinsics GCC 12 converts bytes one
/// by one.
template <class Byte>
inline Mask<float> widen_bytes(const Byte* p) {
  static_assert(sizeof(Byte) == 1);
  [[maybe_unused]] constexpr bool kSigned = std::is_signed_v<Byte>;
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Mask<float>)(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (Mask<float>)(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Bytes __attribute__((vector_size(kLanes<float>)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, Mask<float>);
#endif
}

/// The first `count` of a register's lanes from p[0..count), the others zero.
template <class A, class T>
inline Vec<A> load_first(const T* p, int64_t count) {
  Vec<A> out{};
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<A>(p[i]);
  return out;
}

/// One register of A from unaligned memory of T.
template <class A, class T>
inline Vec<A> load(const T* p) {
  if constexpr (std::is_same_v<A, T>) {
    Vec<A> out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  } else if constexpr (std::is_same_v<A, float> && sizeof(T) == 2) {
    return widen(p);
  } else {
    return load_first<A>(p, kLanes<A>);
  }
}

template <class A>
inline void store(A* p, Vec<A> v) {
  std::memcpy(p, &v, sizeof(v));
}

/// The nearest bfloat16 of each lane, ties to even, as a float; NaN for NaN.
inline Vec<float> round_bf16(Vec<float> v) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  // A NaN whose set bits are all in the lower half would become an infinity.
  return v == v ? reinterpret_cast<Vec<float>>(nearest)
                : Vec<float>{} + std::numeric_limits<float>::quiet_NaN();
}

/// The nearest value of T in each lane.
template <class T, class A>
inline Vec<A> rounded(Vec<A> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return round_bf16(v);
  } else if constexpr (!std::is_same_v<T, A>) {
    for (int i = 0; i < kLanes<A>; ++i) v[i] = static_cast<A>(static_cast<T>(v[i]));
  }
  return v;
}

/// Writes a register of floats rounded to bfloat16.
inline void narrow(BFloat16* p, Vec<float> v) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
  const Bits upper = reinterpret_cast<Bits>(round_bf16(v)) >> 16;
  const Narrow halves = __builtin_convertvector(upper, Narrow);
  std::memcpy(p, &halves, sizeof(halves));
}

/// Writes floats rounded to bfloat16. Subnormal results may become zero, as the instructions that
/// make such sums flush them, too.
template <int kCount>
inline void narrow_sums(BFloat16* to, const float* from) {
#if defined(__AVX512BF16__)
  static_assert(kCount % 32 == 0);
  for (int i = 0; i < kCount; i += 32) {
    const __m512bh both =
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    std::memcpy(to + i, &both, sizeof(both));
  }
#else
  for (int i = 0; i < kCount; i += kLanes<float>) narrow(to + i, load<float>(from + i));
#endif
}

// ---- Across lanes ----------------------------------------------------------------------------

template <int kWidth, class V, int... kLane>
inline V exchange_lanes(V v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, (kLane ^ kWidth)...);
}

/// Combines all lanes pairwise, always in the same order.
template <class A, int kWidth = kLanes<A> / 2, class Combine>
inline A reduce_lanes(Vec<A> v, Combine combine) {
  v = combine(v, exchange_lanes<kWidth>(v, std::make_integer_sequence<int, kLanes<A>>{}));
  if constexpr (kWidth == 1) {
    return v[0];
  } else {
    return reduce_lanes<A, kWidth / 2>(v, combine);
  }
}

template <class A>
inline A sum_lanes(Vec<A> v) {
  return reduce_lanes<A>(v, [](Vec<A> a, Vec<A> b) { return a + b; });
}

template <class A>
inline A max_lanes(Vec<A> v) {
  return reduce_lanes<A>(v, [](Vec<A> a, Vec<A> b) { return a > b ? a : b; });
}

/// The same of integers, whose lanes are those of floats.
template <class Combine>
inline int32_t reduce_integers(Mask<float> v, Combine combine) {
  const float combined = reduce_lanes<float>(
      reinterpret_cast<Vec<float>>(v), [&](Vec<float> a, Vec<float> b) {
        return reinterpret_cast<Vec<float>>(
            combine(reinterpret_cast<Mask<float>>(a), reinterpret_cast<Mask<float>>(b)));
      });
  int32_t bits;
  std::memcpy(&bits, &combined, sizeof(bits));
  return bits;
}

inline Mask<float> larger(Mask<float> a, Mask<float> b) { return a > b ? a : b; }
inline Mask<float> smaller(Mask<float> a, Mask<float> b) { return a < b ? a : b; }

/// 0, 1, 2, ...
template <class A>
inline Mask<A> lane_numbers() {
  Mask<A> out;
  for (int i = 0; i < kLanes<A>; ++i) out[i] = i;
  return out;
}

template <int kBlock, class V, int... kLane>
inline void swap_off_diagonal(V& a, V& b, std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane);
  const V upper = __builtin_shufflevector(a, b, ((kLane & kBlock) ? n + kLane - kBlock : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kBlock) ? n + kLane : kLane + kBlock)...);
  a = upper;
}

/// Transposes a square of registers, by swapping ever smaller off-diagonal blocks. With fewer
/// registers, each square of lanes is transposed by itself.
template <class A, int kBlock = kLanes<A> / 2, size_t kCount>
inline void swap_blocks(Vec<A> (&square)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if ((i & kBlock) == 0) {
      swap_off_diagonal<kBlock>(
          square[i], square[i + kBlock], std::make_integer_sequence<int, kLanes<A>>{});
    }
  }
  if constexpr (kBlock > 1) swap_blocks<A, kBlock / 2>(square);
}

#if defined(__AVX512F__)
/// The same, by instructions that need no register of lane numbers and keep their inputs.
__attribute__((always_inline)) inline void transpose_floats(Vec<float> (&square)[16]) {
  Vec<float> pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(square[i], square[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(square[i], square[i + 1]);
  }
  const auto unpack = [&](int i, int part) {
    const __m512d first = (__m512d)pairs[i + part / 2], second = (__m512d)pairs[i + 2 + part / 2];
    return (__m512)(part % 2 ? _mm512_unpackhi_pd(first, second)
                             : _mm512_unpacklo_pd(first, second));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    // Lane by lane, columns i, 4 + i, 8 + i and 12 + i of four rows each.
    const __m512 a = unpack(0, i), b = unpack(4, i), c = unpack(8, i), d = unpack(12, i);
    constexpr int kEven = 0x88, kOdd = 0xdd;  // Quarters 0 and 2, or 1 and 3, of both.
    const __m512 even_ab = _mm512_shuffle_f32x4(a, b, kEven);
    const __m512 even_cd = _mm512_shuffle_f32x4(c, d, kEven);
    const __m512 odd_ab = _mm512_shuffle_f32x4(a, b, kOdd);
    const __m512 odd_cd = _mm512_shuffle_f32x4(c, d, kOdd);
    square[i] = _mm512_shuffle_f32x4(even_ab, even_cd, kEven);
    square[i + 4] = _mm512_shuffle_f32x4(odd_ab, odd_cd, kEven);
    square[i + 8] = _mm512_shuffle_f32x4(even_ab, even_cd, kOdd);
    square[i + 12] = _mm512_shuffle_f32x4(odd_ab, odd_cd, kOdd);
  }
}
#endif

/// Transposes a square of registers.
template <class A>
__attribute__((always_inline)) inline void transpose(Vec<A> (&square)[kLanes<A>]) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return transpose_floats(square);
#endif
  swap_blocks<A>(square);
}

// ---- Functions -------------------------------------------------------------------------------

/// The nearest integers, ties to even, of numbers that an int32 holds.
inline Mask<float> round_to_integers(Vec<float> x) {
#if defined(__AVX512F__)
  return (Mask<float>)_mm512_cvtps_epi32(x);
#elif defined(__AVX__)
  return (Mask<float>)_mm256_cvtps_epi32(x);
#else
  Mask<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = static_cast<int32_t>(std::nearbyint(x[i]));
  return out;
#endif
}

/// e^x to 2 ulp: 2^n times a polynomial on |r| <= log(2) / 2. Exactly 0 below -87.3 (so for
/// masked scores, -inf), exactly 1 at 0, saturated above 88.3, NaN for NaN.
__attribute__((always_inline)) inline Vec<float> exp(Vec<float> x) {
  const Vec<float> clamped = x > 88.3f ? Vec<float>{} + 88.3f : x;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the significand.
  constexpr float kRounder = 12582912.0f;
  const Vec<float> shifted = clamped * 1.44269504088896341f + kRounder;
  const Vec<float> n = shifted - kRounder;
  const Vec<float> r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const auto power = (reinterpret_cast<Mask<float>>(shifted) + 127) << 23;
  return x < -87.3f ? Vec<float>{} : p * reinterpret_cast<Vec<float>>(power);
}

/// The same of 64 bits: exactly 0 below -708.3, saturated above 709.4.
__attribute__((always_inline)) inline Vec<double> exp(Vec<double> x) {
  const Vec<double> clamped = x > 709.4 ? Vec<double>{} + 709.4 : x;
  constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> shifted = clamped * 1.4426950408889634 + kRounder;
  const Vec<double> n = shifted - kRounder;
  // The first part of log(2) has 32 bits, so that n times it is exact.
  const Vec<double> r = (clamped - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  Vec<double> p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  constexpr double kInverseFactorials[] = {
      1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
      1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
  for (double c : kInverseFactorials) p = p * r + c;
  const auto power = (reinterpret_cast<Mask<double>>(shifted) + 1023) << 52;
  return x < -708.3 ? Vec<double>{} : p * reinterpret_cast<Vec<double>>(power);
}

/// e^x for x <= 0, in half the instructions: 2^n times a polynomial in base 2. One reduction in place
/// of two, so its relative error grows with x: 1.6e-7 + 1.4e-8 |x|. Exactly 0 below -87.3, exactly 1
/// at 0, NaN for NaN.
__attribute__((always_inline)) inline Vec<float> exp_nonpositive(Vec<float> x) {
  // As above. The low bits are those of n + 127, the exponent of 2^n.
  constexpr float kRounder = 12582912.0f + 127, kLog2E = 1.44269504088896341f;
  const Vec<float> shifted = x * kLog2E + kRounder;
  const Vec<float> r = x * kLog2E - (shifted - kRounder);
  Vec<float> p = r * 1.326472731e-3f + 9.671512991e-3f;
  p = p * r + 5.5507335812e-2f;
  p = p * r + 2.40222424269e-1f;
  p = p * r + 6.93147003651e-1f;
  p = p * r + 1.0f;
  const auto power = reinterpret_cast<Mask<float>>(shifted) << 23;
  return x < -87.3f ? Vec<float>{} : p * reinterpret_cast<Vec<float>>(power);
}

inline Vec<double> exp_nonpositive(Vec<double> x) { return exp(x); }

template <class V>
inline V tanh(V x) {
  return 1 - 2 / (exp(2 * x) + 1);
}

}  // namespace mtpc
