// Products with packed weights: one stream of weights, whatever the number of rows.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "simd.h"
#include "tensors.h"

namespace mtpc {

/// Output features in a tile, as in mtpc/packing.py.
inline constexpr int kFeatures = 32;

/// Registers of sums that a row of a tile takes.
inline constexpr int kRegisters = kFeatures / kLanes<float>;

/// Rows that share one pass over a tile: as many as leave registers for weights and inputs.
inline constexpr int kMostRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 3 : 1;

/// Bytes ahead of the weights in use that are fetched meanwhile, into the second level cache. With
/// one row any distance will do; from 8 rows on, a shorter one leaves a third of the speed.
inline constexpr int64_t kAhead = 4096;

inline int64_t count_tiles(int64_t features) { return (features + kFeatures - 1) / kFeatures; }

/// Four bytes of adjacent inputs: two of bfloat16, four of int8.
using Group = int32_t;

/// A register of groups, one of each of so many features.
using Groups = Mask<float>;

/// Pairs of bfloat16, added up in float.
struct Bf16Pairs {
  using Sum = float;
  using Sums = Vec<float>;

  /// sums + a.first * b.first + a.second * b.second, lane by lane.
  static Sums add(Sums sums, Groups a, Groups b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
    const auto first = [](Groups p) { return reinterpret_cast<Vec<float>>(p << 16); };
    const auto second = [](Groups p) { return reinterpret_cast<Vec<float>>(p & ~0xffff); };
    sums += first(a) * first(b);
    return sums + second(a) * second(b);
#endif
  }
};

/// Quads of int8, those of the weights without a sign; sums are exact up to 65,000 inputs.
struct Int8Quads {
  using Sum = int32_t;
  using Sums = Groups;

  /// sums + the products of a's four with b's four, lane by lane.
  static Sums add(Sums sums, Groups a, Groups b) {
#if defined(__AVX512VNNI__)
    return (Groups)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Pairs of 16 bits, which hold any product of two bytes twice over: the even bytes', the odd's.
    const __m256i low = _mm256_set1_epi32(0x00ff00ff);
    const __m256i even = _mm256_madd_epi16(
        _mm256_and_si256((__m256i)a, low), _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(
        _mm256_srli_epi16((__m256i)a, 8), _mm256_srai_epi16((__m256i)b, 8));
    return sums + (Groups)_mm256_add_epi32(even, odd);
#else
    for (int i = 0; i < 4; ++i) sums += (a >> 8 * i & 0xff) * (b << (24 - 8 * i) >> 24);
    return sums;
#endif
  }
};

/// Sums of one tile's features, by row.
template <class Dot>
using TileSums = typename Dot::Sum[kMostRows][kFeatures];

/// Rows of so many groups, `stride` groups apart.
struct InputRows {
  const Group* first;
  int64_t groups, stride;
};

/// Dense rows of so many inputs.
template <class T>
InputRows dense_rows(const T* first, int64_t inputs) {
  const int64_t groups = inputs * sizeof(T) / sizeof(Group);
  return {reinterpret_cast<const Group*>(first), groups, groups};
}

/// Dense rows, copied further apart where the same places of several are in one set of the first
/// level cache: it has eight ways, and twelve rows go through it side by side.
class SpacedRows {
 public:
  template <class T>
  SpacedRows(const T* first, int64_t rows, int64_t inputs) : rows_(dense_rows(first, inputs)) {
    const int64_t bytes = inputs * sizeof(T);
    if (rows < kFewRows || bytes % kAliased != 0) return;
    const int64_t spaced = bytes + 64;
    char* to = copy_.reserve(rows * spaced);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * spaced, first + r * inputs, bytes);
    rows_.first = reinterpret_cast<const Group*>(to);
    rows_.stride = spaced / sizeof(Group);
  }

  InputRows rows() const { return rows_; }

 private:
  static constexpr int64_t kFewRows = 5, kAliased = 1024;
  Buffer<char> copy_;
  InputRows rows_;
};

/// What to fetch meanwhile: bytes from `from` on, `step` of them with each group.
struct Fetch {
  const char* from;
  int64_t step;
};

/// kRows rows times one tile. Every sum runs over the inputs in order, whatever kRows is.
template <class Dot, int kRows>
void multiply_rows(InputRows x, const Group* tile, Fetch fetch, TileSums<Dot>& out) {
  typename Dot::Sums sums[kRows][kRegisters]{};
  for (int64_t k = 0; k < x.groups; ++k, tile += kFeatures, fetch.from += fetch.step) {
    Groups weights[kRegisters];
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      const char* from = reinterpret_cast<const char*>(tile) + i * kVectorBytes;
      std::memcpy(&weights[i], from, kVectorBytes);
    }
    __builtin_prefetch(fetch.from, 0, 2);
    __builtin_prefetch(fetch.from + fetch.step / 2, 0, 2);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Group group = x.first[r * x.stride + k];
#pragma GCC unroll 8
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = Dot::add(sums[r][i], weights[i], Groups{} + group);
      }
    }
  }
  // One by one: copied as a whole they would live in memory, not in registers.
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      std::memcpy(out[r] + i * kLanes<float>, &sums[r][i], kVectorBytes);
    }
  }
}

template <class Dot>
using MultiplyRows = void (*)(InputRows, const Group*, Fetch, TileSums<Dot>&);

template <class Dot, int... kRows>
constexpr std::array<MultiplyRows<Dot>, sizeof...(kRows)> multiply_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_rows<Dot, kRows + 1>...};
}

/// By the number of rows, less one.
template <class Dot>
inline constexpr auto kMultiply =
    multiply_table<Dot>(std::make_integer_sequence<int, kMostRows>{});

/// Rows of x times one tile; body(row, its 32 sums) for each.
template <class Dot, class Body>
void for_products(InputRows x, int64_t rows, const void* tile, const Body& body) {
  const Group* weights = static_cast<const Group*>(tile);
  const char* bytes = static_cast<const char*>(tile);
  const int64_t size = x.groups * kFeatures * sizeof(Group);
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = pass * rows / passes, count = (pass + 1) * rows / passes - row;
    // The first pass takes the tile from memory, the others from the second-level cache: each
    // fetches its part of the next tile.
    const int64_t step = kFeatures * sizeof(Group) / passes;
    const Fetch fetch{bytes + (passes == 1 ? kAhead : size + pass * step * x.groups), step};
    TileSums<Dot> sums;
    const InputRows part{x.first + row * x.stride, x.groups, x.stride};
    kMultiply<Dot>[count - 1](part, weights, fetch, sums);
    for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
  }
}

}  // namespace mtpc
