// Products with packed bfloat16 weights: one stream of weights, whatever the number of rows.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "simd.h"

namespace mtpc {

/// Output features in a tile, as in mtpc/packing.py.
inline constexpr int kFeatures = 32;

/// Registers of sums that a row of a tile takes.
inline constexpr int kRegisters = kFeatures / kLanes<float>;

/// Rows that share one pass over a tile: as many as leave registers for weights and inputs.
inline constexpr int kMostRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 3 : 1;

/// Bytes ahead of the weights in use that are fetched meanwhile, into the second level cache.
inline constexpr int64_t kAhead = 1024;

inline int64_t count_tiles(int64_t features) { return (features + kFeatures - 1) / kFeatures; }

/// A register of pairs of bfloat16: one pair a lane.
using Pairs = Mask<float>;

/// sum + a.first * b.first + a.second * b.second, lane by lane.
inline Vec<float> add_pairs(Vec<float> sum, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const auto first = [](Pairs p) { return reinterpret_cast<Vec<float>>(p << 16); };
  const auto second = [](Pairs p) { return reinterpret_cast<Vec<float>>(p & ~0xffff); };
  sum += first(a) * first(b);
  return sum + second(a) * second(b);
#endif
}

/// Sums of one tile's features, by row.
using TileSums = float[kMostRows][kFeatures];

/// kRows dense rows times one tile. Every sum runs over the inputs in order, whatever kRows is.
template <int kRows>
void multiply_rows(const BFloat16* x, int64_t inputs, const BFloat16* tile, TileSums& out) {
  Vec<float> sums[kRows][kRegisters]{};
  for (int64_t k = 0; k < inputs; k += 2, tile += 2 * kFeatures) {
    Pairs weights[kRegisters];
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      const char* from = reinterpret_cast<const char*>(tile) + i * kVectorBytes;
      std::memcpy(&weights[i], from, kVectorBytes);
      __builtin_prefetch(from + kAhead, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * inputs + k, sizeof(pair));
#pragma GCC unroll 8
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = add_pairs(sums[r][i], weights[i], Pairs{} + pair);
      }
    }
  }
  // One by one: copied as a whole they would live in memory, not in registers.
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) store(out[r] + i * kLanes<float>, sums[r][i]);
  }
}

using MultiplyRows = void (*)(const BFloat16*, int64_t, const BFloat16*, TileSums&);

template <int... kRows>
constexpr std::array<MultiplyRows, sizeof...(kRows)> multiply_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_rows<kRows + 1>...};
}

/// By the number of rows, less one.
inline constexpr auto kMultiply = multiply_table(std::make_integer_sequence<int, kMostRows>{});

/// Dense rows x [rows, inputs] times one tile; body(row, its 32 sums) for each.
template <class Body>
void for_products(const BFloat16* x, int64_t rows, int64_t inputs, const BFloat16* tile,
                  const Body& body) {
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const int64_t count = std::min<int64_t>(kMostRows, rows - row);
    TileSums sums;
    kMultiply[count - 1](x + row * inputs, inputs, tile, sums);
    for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
  }
}

}  // namespace mtpc
