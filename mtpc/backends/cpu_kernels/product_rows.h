// Parts of products with packed weights: groups of inputs, their dot products, rows, sums.
#pragma once

#include <algorithm>
#include <cstring>

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

#if defined(__AVX512BF16__)

/// Whether this level has an instruction for products of pairs of bfloat16.
inline constexpr bool kPairProducts = true;

/// Inputs of kRows rows, as an instruction for pairs of bfloat16 takes them: as they are.
template <int kRows>
class Inputs {
 public:
  /// Groups of a row that are taken at a time.
  static constexpr int64_t kGroups = 1 << 30;

  /// Takes `count` groups of each row, from group `begin` on.
  void take(InputRows x, int64_t begin, int64_t) {
    first_ = x.first + begin;
    stride_ = x.stride;
  }

  /// sums + the products of both elements of row r's group g and of each of `weights`.
  Vec<float> add(Vec<float> sums, int r, int64_t g, Groups weights) const {
    const Groups group = Groups{} + first_[r * stride_ + g];
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)group);
  }

 private:
  const Group* first_;
  int64_t stride_;
};

#else

inline constexpr bool kPairProducts = false;

/// Inputs of kRows rows, widened to float once: that leaves two multiply-adds for each register of
/// weights.
template <int kRows>
class Inputs {
 public:
  /// Groups of a row that are taken at a time. Those of twelve rows are 6 KB, and stay in the
  /// first-level cache.
  static constexpr int64_t kGroups = 64;

  /// Takes `count` groups of each row, from group `begin` on. Memory beyond them is not read.
  void take(InputRows x, int64_t begin, int64_t count) {
    constexpr int64_t kN = kLanes<float>;
    for (int r = 0; r < kRows; ++r) {
      const Group* from = x.first + r * x.stride + begin;
      for (int64_t g = 0; g < count; g += kN) {
        Groups pairs{};
        if (g + kN <= count) {
          std::memcpy(&pairs, from + g, sizeof(pairs));  // Of a fixed size: one instruction.
        } else {
          std::memcpy(&pairs, from + g, (count - g) * sizeof(Group));
        }
        store(first_[r] + g, first_of(pairs));
        store(second_[r] + g, second_of(pairs));
      }
    }
  }

  /// sums + the products of both elements of row r's group g and of each of `weights`, in order.
  Vec<float> add(Vec<float> sums, int r, int64_t g, Groups weights) const {
    sums += first_[r][g] * first_of(weights);
    return sums + second_[r][g] * second_of(weights);
  }

 private:
  /// A bfloat16 is the upper half of a float.
  static Vec<float> first_of(Groups pairs) { return reinterpret_cast<Vec<float>>(pairs << 16); }
  static Vec<float> second_of(Groups pairs) {
    return reinterpret_cast<Vec<float>>(pairs & ~0xffff);
  }

  alignas(kVectorBytes) float first_[kRows][kGroups], second_[kRows][kGroups];
};

#endif

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

/// Whether weights that are read once a step go past the second-level cache, so that they do not
/// evict code, rows and keys from it. That is right for AMD's processors, at whose level there are no
/// tile registers; on Intel's such a fetch makes products of one row a third slower or more.
#if defined(__AMX_TILE__)
inline constexpr bool kGoesPast = false;
#else
inline constexpr bool kGoesPast = kPairProducts;
#endif

/// The cache that __builtin_prefetch fetches them into: the first level, alone (0) or with the
/// second.
inline constexpr int kPassing = kGoesPast ? 0 : 3;

/// Bytes to prefetch during a product: from `from` on, `step` of them with each group.
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
