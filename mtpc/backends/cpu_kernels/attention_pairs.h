// Scores as products of pairs of bfloat16: bfloat16 queries against bfloat16 caches.
//
// A panel of keys is packed as weights are (product_rows.h), by pairs of dimensions. The rows of a
// unit share it. A row's sums run over the dimensions in order, whatever the rows beside it.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "product_rows.h"

namespace mtpc {

/// Whether this level takes the scores of such caches from pairs.
template <class A, class T>
inline constexpr bool kPairs =
#if defined(__AVX512BF16__)
    std::is_same_v<A, float> && std::is_same_v<T, BFloat16>;
#else
    false;
#endif

#if defined(__AVX512BF16__)

/// 16 groups of a row of bfloat16, of which `valid` elements exist.
inline Vec<float> load_groups(const BFloat16* row, int64_t valid) {
  if (valid >= 2 * kLanes<float>) return load<float>(reinterpret_cast<const float*>(row));
  Vec<float> groups{};
  std::memcpy(&groups, row, valid * sizeof(BFloat16));
  return groups;
}

/// panel[g][j] = group g of keys[j] + shift, zeros where keys[j] is null: a key that nobody sees is
/// not read.
inline void pack_keys(const BFloat16* const* keys, int64_t shift, int64_t width, Group* panel) {
  for (int64_t d = 0; d < width; d += 2 * kLanes<float>) {
    const int64_t groups = std::min<int64_t>((width - d) / 2, kLanes<float>);
    for (int part = 0; part < kFeatures; part += kLanes<float>) {
      Vec<float> square[kLanes<float>];
      for (int j = 0; j < kLanes<float>; ++j) {
        const BFloat16* key = keys[part + j];
        square[j] = key == nullptr ? Vec<float>{} : load_groups(key + shift + d, width - d);
      }
      transpose<float>(square);
      for (int64_t g = 0; g < groups; ++g) {
        std::memcpy(panel + (d / 2 + g) * kFeatures + part, &square[g], sizeof(square[g]));
      }
    }
  }
}

/// scores[r][0..32) = queries[r] . keys of one packed panel, for kTile rows.
template <int kTile>
void score_pairs(const BFloat16* queries, int64_t width, const Group* panel, float* scores) {
  constexpr int kN = kLanes<float>;
  const int64_t groups = width / 2;
  const Group* rows = reinterpret_cast<const Group*>(queries);
  Vec<float> low[kTile]{}, high[kTile]{};
  for (int64_t g = 0; g < groups; ++g) {
    Groups keys[2];
    std::memcpy(keys, panel + g * kFeatures, sizeof(keys));
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
      Group group;
      std::memcpy(&group, rows + r * groups + g, sizeof(group));
      low[r] = Bf16Pairs::add(low[r], Groups{} + group, keys[0]);
      high[r] = Bf16Pairs::add(high[r], Groups{} + group, keys[1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
    store(scores + r * kSplit, low[r]);
    store(scores + r * kSplit + kN, high[r]);
  }
}

#endif

}  // namespace mtpc
