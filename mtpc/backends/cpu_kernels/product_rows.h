// What products with packed weights are made of: groups of inputs, their dots, rows, sums.
#pragma once

#include "simd.h"
#include "tensors.h"

namespace mtpc {

/// Output features in a tile, as in mtpc/weights/packing.py.
inline constexpr int kFeatures = 32;

inline int64_t count_tiles(int64_t features) { return (features + kFeatures - 1) / kFeatures; }

/// Four bytes of adjacent inputs: two of bfloat16, four of int8.
using Group = int32_t;

/// A group of each feature of a tile.
inline constexpr int64_t kGroupBytes = kFeatures * sizeof(Group);

/// A register of groups, one of each of so many features.
using Groups = Mask<float>;

/// sums + a.first * b.first + a.second * b.second of pairs of bfloat16, lane by lane.
inline Vec<float> add_pairs(Vec<float> sums, Groups a, Groups b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
  const auto first = [](Groups p) { return reinterpret_cast<Vec<float>>(p << 16); };
  const auto second = [](Groups p) { return reinterpret_cast<Vec<float>>(p & ~0xffff); };
  sums += first(a) * first(b);
  return sums + second(a) * second(b);
#endif
}

/// Sums of one tile's features, by row.
template <int kRows>
using TileSums = float[kRows][kFeatures];

/// Rows of so many groups, `stride` groups apart.
struct InputRows {
  const Group* first;
  int64_t groups, stride;

  /// `count` groups of the rows from `row` on, beginning with group `group`.
  InputRows from(int64_t row, int64_t group, int64_t count) const {
    return {first + row * stride + group, count, stride};
  }
};

/// Dense rows of so many inputs.
inline InputRows dense_rows(const BFloat16* first, int64_t inputs) {
  const int64_t groups = inputs * sizeof(BFloat16) / sizeof(Group);
  return {reinterpret_cast<const Group*>(first), groups, groups};
}

/// Bytes from one row to the next: a line more where the same places of several would be in one set
/// of the first-level cache, which has eight ways; twelve rows go through it side by side.
inline int64_t spaced(int64_t row_bytes) {
  constexpr int64_t kAliased = 1024, kLine = 64;
  return row_bytes % kAliased == 0 ? row_bytes + kLine : row_bytes;
}

/// What to fetch meanwhile: bytes from `from` on, `step` of them with each group.
struct Fetch {
  const char* from;
  int64_t step;
};

/// A pass's part of the next tile, where several share one: the first takes the tile from memory,
/// the others from the second-level cache.
inline Fetch fetch_next(const char* tile, int64_t groups, int64_t pass, int64_t passes) {
  const int64_t step = kGroupBytes / passes;
  return {tile + groups * (kGroupBytes + pass * step), step};
}

}  // namespace mtpc
