// Dot products with weights as they are stored, row by row: several inputs to a row of weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace mtpc {

/// How a dot product of T advances: kStep elements of both operands into one accumulator.
template <class T>
struct Dot {
  using A = Accumulator<T>;
  using Chunk = Vec<A>;
  static constexpr int kStep = kLanes<A>;

  static Chunk load(const T* p) { return mtpc::load<A>(p); }
  static Chunk load_first(const T* p, int64_t count) { return mtpc::load_first<A>(p, count); }
  static void add(Vec<A>& sum, Chunk a, Chunk b) { sum += a * b; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct Dot<BFloat16> {
  using A = float;
  using Chunk = __m512bh;
  static constexpr int kStep = 32;

  static Chunk load(const BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Chunk load_first(const BFloat16* p, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
  }
  static void add(Vec<float>& sum, Chunk a, Chunk b) { sum = _mm512_dpbf16_ps(sum, a, b); }
};
#endif

/// Weight rows of one tile. With one input row this many sums hide the latency of an addition.
constexpr int kTile = 4;

/// Weight rows `begin` to begin + kTile of one expert; beyond the last row, the last row again.
template <class T>
struct WeightRows {
  const T* row[kTile];
  int64_t ahead;  // two tiles on: what to fetch into the second-level cache meanwhile

  WeightRows(const T* weights, int64_t stride, int64_t begin, int64_t end)
      : ahead(2 * kTile * stride) {
    for (int i = 0; i < kTile; ++i) row[i] = weights + std::min(begin + i, end - 1) * stride;
  }
};

/// out[w][i] = weights[w] . inputs[i]; each is summed in the same order whatever kInputs is.
template <int kInputs, class T>
void dot_tile(const WeightRows<T>& weights, const T* const* inputs, int64_t width,
              Accumulator<T> (&out)[kTile][kInputs]) {
  using D = Dot<T>;
  Vec<Accumulator<T>> sums[kTile][kInputs]{};
  const auto step = [&](auto fetch, int64_t k) __attribute__((always_inline)) {
    typename D::Chunk input[kInputs];
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; ++i) input[i] = fetch(inputs[i] + k);
#pragma GCC unroll 4
    for (int w = 0; w < kTile; ++w) {
      const typename D::Chunk weight = fetch(weights.row[w] + k);
      __builtin_prefetch(weights.row[w] + weights.ahead + k, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < kInputs; ++i) D::add(sums[w][i], weight, input[i]);
    }
  };
  int64_t k = 0;
  for (; k + D::kStep <= width; k += D::kStep) step(D::load, k);
  if (k < width) step([&](const T* p) { return D::load_first(p, width - k); }, k);
  for (int w = 0; w < kTile; ++w) {
    for (int i = 0; i < kInputs; ++i) out[w][i] = sum_lanes<Accumulator<T>>(sums[w][i]);
  }
}

/// Calls body(integral_constant n, first) for tiles of 4, 2 and 1 inputs.
template <class Body>
void for_input_tiles(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; count - i >= 4; i += 4) body(std::integral_constant<int, 4>{}, i);
  if (count - i >= 2) body(std::integral_constant<int, 2>{}, i), i += 2;
  if (count - i >= 1) body(std::integral_constant<int, 1>{}, i);
}

}  // namespace mtpc
