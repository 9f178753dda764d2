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
#if defined(__AVX512F__)
    std::is_same_v<A, float> && std::is_same_v<T, BFloat16>;
#else
    false;
#endif

/// Whether this level adds up values of such caches by pairs of keys, with weights of bfloat16.
template <class A, class T>
inline constexpr bool kValuePairs =
#if defined(__AMX_TILE__)
    false;  // In tile registers (attention_amx.h).
#else
    kPairs<A, T> && kPairProducts;
#endif

/// The cache that __builtin_prefetch fetches what is not needed soon into: the second level. Into the
/// first one (kPassing) go the lines of the next panel. AMD's processors drop other fetches where too
/// many are under way.
inline constexpr int kLater = 2;

/// Lines of rows that are needed soon. They are fetched in the order of memory, some with each piece of
/// work: then the processor's own prefetchers help, and the work goes on meanwhile. A burst of
/// fetches would make all else wait, or be dropped. Loops take a copy of their own: it stays in
/// registers, where through a reference each fetch would wait for the one before.
class LinesAhead {
 public:
  /// `count` rows of `elements` each; rows may be null where the count is 0.
  LinesAhead(const BFloat16* const* rows, int64_t count, int64_t elements)
      : row_(rows), end_(rows + count), elements_(elements) {
    if (row_ < end_) begin_row();
  }

  /// Fetches the next `lines`, as far as there are so many.
  template <int kCache = kPassing>
  void fetch(int64_t lines) {
    for (; lines > 0 && row_ < end_; --lines) {
      __builtin_prefetch(line_, 0, kCache);
      line_ += kFeatures;
      if (line_ < row_end_) continue;
      if (++row_ < end_) begin_row();
    }
  }

 private:
  void begin_row() {
    line_ = *row_;
    row_end_ = line_ + elements_;
  }

  const BFloat16 *const *row_, *const *end_;
  const BFloat16 *line_ = nullptr, *row_end_ = nullptr;
  int64_t elements_;
};

#if defined(__AVX512F__)

/// 16 groups of a row of bfloat16, of which `valid` elements exist.
inline Vec<float> load_groups(const BFloat16* row, int64_t valid) {
  if (valid >= 2 * kLanes<float>) return load<float>(reinterpret_cast<const float*>(row));
  Vec<float> groups{};
  std::memcpy(&groups, row, valid * sizeof(BFloat16));
  return groups;
}

/// panel[g][j] = group g of keys[j] + shift, zeros where keys[j] is null: a key that no row sees is not
/// read. In a whole panel all keys are seen.
template <bool kWhole>
void pack_some_keys(const BFloat16* const* keys, int64_t shift, int64_t width, LinesAhead& lines,
                    Group* panel) {
  constexpr int kN = kLanes<float>;
  LinesAhead ahead = lines;
  for (int64_t d = 0; d < width; d += 2 * kN) {
    const int64_t valid = kWhole ? 2 * kN : width - d;
    const int64_t groups = std::min<int64_t>(valid / 2, kN);
    for (int part = 0; part < kFeatures; part += kN) {
      Vec<float> square[kN];
#pragma GCC unroll 16
      for (int j = 0; j < kN; ++j) {
        const BFloat16* key = keys[part + j];
        square[j] = !kWhole && key == nullptr ? Vec<float>{} : load_groups(key + shift + d, valid);
        if (j % 2 == 0) ahead.fetch(1);
      }
      transpose<float>(square);
      Group* to = panel + d / 2 * kFeatures + part;
#pragma GCC unroll 16
      for (int64_t g = 0; g < kN; ++g) {
        if (g < groups) std::memcpy(to + g * kFeatures, &square[g], sizeof(square[g]));
      }
    }
  }
  lines = ahead;
}

/// The same; `whole` says that all keys of the panel are seen.
inline void pack_keys(const BFloat16* const* keys, bool whole, int64_t shift, int64_t width,
                      LinesAhead& ahead, Group* panel) {
  const bool even = whole && width % kFeatures == 0;
  const auto pack = even ? pack_some_keys<true> : pack_some_keys<false>;
  pack(keys, shift, width, ahead, panel);
}

/// scores[r][0..32) = queries[r] . keys of one packed panel, for kTile rows.
template <int kTile, bool kFetch>
void score_pairs(const BFloat16* queries, int64_t width, const Group* panel, LinesAhead* lines,
                 float* scores) {
  constexpr int kN = kLanes<float>;
  LinesAhead ahead = kFetch ? *lines : LinesAhead{nullptr, 0, 0};
  const InputRows rows = dense_rows(queries, width);
  Vec<float> low[kTile]{}, high[kTile]{};
  Inputs<kTile> inputs;
  for (int64_t begin = 0; begin < rows.groups; begin += inputs.kGroups) {
    const int64_t count = std::min(inputs.kGroups, rows.groups - begin);
    inputs.take(rows, begin, count);
    for (int64_t g = 0; g < count; ++g, panel += kFeatures) {
      Groups keys[2];
      std::memcpy(&keys[0], panel, sizeof(keys[0]));
      std::memcpy(&keys[1], panel + kN, sizeof(keys[1]));
#pragma GCC unroll 8
      for (int r = 0; r < kTile; ++r) {
        low[r] = inputs.add(low[r], r, g, keys[0]);
        high[r] = inputs.add(high[r], r, g, keys[1]);
      }
      if (kFetch) ahead.fetch(1);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
    store(scores + r * kSplit, low[r]);
    store(scores + r * kSplit + kN, high[r]);
  }
  if (kFetch) *lines = ahead;
}

/// Lets add(sums) add to kTile rows of kVecs registers that are kept in `out` before and after.
template <int kTile, int kVecs, class Add>
__attribute__((always_inline)) inline void add_to_rows(
    float* out, int64_t stride, const Add& add) {
  constexpr int kN = kLanes<float>;
  Vec<float> sums[kTile][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load<float>(out + r * stride + i * kN);
  }
  add(sums);
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) store(out + r * stride + i * kN, sums[r][i]);
  }
}

/// out[r][..] += sum over keys of weights[r][key] * values[key][shift..], in key order, for kTile
/// rows and kBlocks times 32 dimensions. Of each 32 the even ones come first: a bfloat16 is the
/// upper half of a float, so that taking them apart needs no shuffling.
template <int kTile, int kBlocks, bool kFetch>
void value_blocks(const float* weights, const BFloat16* const* values, int64_t shift, Range keys,
                  int64_t valid, LinesAhead* lines, float* out, int64_t out_stride) {
  constexpr int kVecs = 2 * kBlocks;
  LinesAhead ahead = kFetch ? *lines : LinesAhead{nullptr, 0, 0};
  add_to_rows<kTile, kVecs>(out, out_stride, [&](auto& sums) __attribute__((always_inline)) {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      Vec<float> value[kVecs];
#pragma GCC unroll 8
      for (int i = 0; i < kBlocks; ++i) {
        const BFloat16* from = values[key] + shift + i * kFeatures;
        const Groups both = (Groups)load_groups(from, kBlocks > 1 ? kFeatures : valid);
        value[2 * i] = (Vec<float>)(both << 16);
        value[2 * i + 1] = (Vec<float>)(both & ~0xffff);
        if (kFetch) ahead.fetch(1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kTile; ++r) {
        const float weight = weights[r * kSplit + key];
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) sums[r][i] += weight * value[i];
      }
    }
  });
  if (kFetch) *lines = ahead;
}

/// Two values by pairs, for 32 dimensions: of each 8, the first 4 are in the first register.
inline void pair_values(Groups a, Groups b, Groups (&pairs)[2]) {
  pairs[0] = (Groups)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  pairs[1] = (Groups)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}

/// Brings 32 sums over such pairs into the order of their dimensions.
inline void order_halves(Vec<float> (&sums)[2]) {
  const __m512d first = (__m512d)sums[0], second = (__m512d)sums[1];
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  sums[0] = (Vec<float>)_mm512_permutex2var_pd(first, low, second);
  sums[1] = (Vec<float>)_mm512_permutex2var_pd(first, high, second);
}

/// out[r][..] += sum over pairs of keys of weights[r][key] * values[key][shift..], in key order, for
/// kTile rows and kBlocks times 32 dimensions, which are in the order of `pair_values`. `keys` is of
/// whole pairs.
template <int kTile, int kBlocks, bool kFetch>
void value_pair_blocks(const BFloat16* weights, const BFloat16* const* values, int64_t shift,
                       Range keys, int64_t valid, LinesAhead* lines, float* out,
                       int64_t out_stride) {
  constexpr int kVecs = 2 * kBlocks;
  LinesAhead ahead = kFetch ? *lines : LinesAhead{nullptr, 0, 0};
  add_to_rows<kTile, kVecs>(out, out_stride, [&](auto& sums) __attribute__((always_inline)) {
    Inputs<kTile> inputs;
    inputs.take(dense_rows(weights, kSplit), keys.begin / 2, keys.size() / 2);
    for (int64_t pair = 0; pair < keys.size() / 2; ++pair) {
      const BFloat16* const* both = values + keys.begin + 2 * pair;
      Groups pairs[kBlocks][2];
#pragma GCC unroll 8
      for (int i = 0; i < kBlocks; ++i) {
        const auto load = [&](const BFloat16* value) {
          const BFloat16* from = value + shift + i * kFeatures;
          return (Groups)load_groups(from, kBlocks > 1 ? kFeatures : valid);
        };
        pair_values(load(both[0]), load(both[1]), pairs[i]);
        if (kFetch) ahead.fetch(2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
          sums[r][i] = inputs.add(sums[r][i], r, pair, pairs[i / 2][i % 2]);
        }
      }
    }
  });
  if (kFetch) *lines = ahead;
}

/// Calls add(integral_constant kBlocks, bool_constant kFetch, column) for all dimensions, as many
/// blocks of 32 at a time as leave registers for kTile rows of sums.
template <int kTile, class Add>
inline void for_blocks(int64_t width, bool fetches, const Add& add) {
  constexpr int kBlocks = kTile == 8 ? 1 : kTile == 4 ? 2 : 4;
  const auto add_one = [&](auto blocks, int64_t column) {
    if (fetches) return add(blocks, std::true_type{}, column);
    add(blocks, std::false_type{}, column);
  };
  int64_t column = 0;
  for (; column + kBlocks * kFeatures <= width; column += kBlocks * kFeatures) {
    add_one(std::integral_constant<int, kBlocks>{}, column);
  }
  for (; column < width; column += kFeatures) add_one(std::integral_constant<int, 1>{}, column);
}

/// All dimensions of value_blocks; out rows are padded to whole blocks.
template <int kTile>
void value_row_blocks(const float* weights, const BFloat16* const* values, int64_t shift,
                      Range keys, int64_t width, LinesAhead* ahead, float* out,
                      int64_t out_stride) {
  for_blocks<kTile>(width, ahead, [&](auto blocks, auto fetches, int64_t column) {
    value_blocks<kTile, blocks, fetches>(
        weights, values, shift + column, keys, width - column, ahead, out + column, out_stride);
  });
}

/// All dimensions of value_pair_blocks; out rows are padded to whole blocks.
template <int kTile>
void value_row_pairs(const BFloat16* weights, const BFloat16* const* values, int64_t shift,
                     Range keys, int64_t width, LinesAhead* ahead, float* out,
                     int64_t out_stride) {
  for_blocks<kTile>(width, ahead, [&](auto blocks, auto fetches, int64_t column) {
    value_pair_blocks<kTile, blocks, fetches>(
        weights, values, shift + column, keys, width - column, ahead, out + column, out_stride);
  });
}

/// Puts dimensions of value_blocks back in order.
inline void order_dimensions(float* sums, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kFeatures) {
    float block[kFeatures];
    for (int i = 0; i < kFeatures; ++i) block[i] = sums[d + i % 2 * kLanes<float> + i / 2];
    std::memcpy(sums + d, block, sizeof(block));
  }
}

/// Puts dimensions of value_pair_blocks back in order.
inline void order_pair_dimensions(float* sums, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kFeatures) {
    Vec<float> block[2];
    std::memcpy(block, sums + d, sizeof(block));
    order_halves(block);
    std::memcpy(sums + d, block, sizeof(block));
  }
}

#endif

}  // namespace mtpc
