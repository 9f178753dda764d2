// Attention's products in AMX's tile registers: bfloat16 queries against bfloat16 caches.
//
// A split's values are packed by pairs of keys, as its keys are by pairs of dimensions
// (attention_pairs.h), and the rows of a unit share them. Few rows take the keys as they are. Weights of values are taken as the sum of
// two bfloat16, so that they keep 16 bits: rounded to one they would lose what float has over it.
// A row's sums run over the positions in order, and unseen ones add exact zeros: they depend neither
// on the rows beside it nor on where the unit's positions begin and end.
#pragma once

#include <algorithm>

#include "attention_pairs.h"
#include "tile_products.h"

namespace mtpc {

/// tile[j][d] = dimensions column + d of values[2 j] and values[2 j + 1] side by side, for the
/// positions of `range`, which begins and ends with a pair; zeros where they are outside of `local`.
inline void pack_values(const BFloat16* const* values, Range range, Range local, int64_t column,
                        int64_t valid, Group* tile) {
  const auto row = [&](int64_t j) {
    return j < local.begin || j >= local.end ? _mm512_setzero_si512()
                                             : (__m512i)load_groups(values[j] + column, valid);
  };
  // Halves of a lane from the first and the second row in turn.
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
      3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t j = range.begin; j < range.end; j += 2) {
    const __m512i first = row(j), second = row(j + 1);
    Group* to = tile + j / 2 * kFeatures;
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
    _mm512_storeu_si512(to + kTileRows, _mm512_permutex2var_epi16(first, high, second));
  }
}

/// high + low = weights, to 16 bits, for the positions of `range`, which is of whole panels.
inline void split_weights(const float* weights, Range range, BFloat16* high, BFloat16* low) {
  constexpr int kN = kLanes<float>;
  for (int64_t j = range.begin; j < range.end; j += 2 * kN) {
    narrow_sums<2 * kN>(high + j, weights + j);
    alignas(64) float rest[2 * kN];
    for (int i = 0; i < 2 * kN; i += kN) {
      store(rest + i, load<float>(weights + j + i) - widen(high + j + i));
    }
    narrow_sums<2 * kN>(low + j, rest);
  }
}

/// Calls body(first row, count) for passes of up to 32 rows, the registers configured for them.
template <class Body>
void for_passes(int64_t rows, const Body& body) {
  PassRegisters registers;
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const int64_t count = std::min<int64_t>(kMostRows, rows - row);
    registers.set_rows(count);
    body(row, count);
  }
}

static_assert(kFewRows == kTileRows);

/// packed[g][r] = group g of row r, for up to `kFewRows` rows; zeros where there is none.
inline void pack_queries(const BFloat16* queries, int64_t rows, int64_t width, Group* packed) {
  const Group* from = reinterpret_cast<const Group*>(queries);
  const int64_t groups = width / 2;
  std::fill_n(packed, groups * kFewRows, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) packed[g * kFewRows + r] = from[r * groups + g];
  }
}

/// scores[r][0..32) = queries[r] . keys[0..32), for up to `kFewRows` rows, packed. Keys are inputs of
/// the product and lie `stride` elements apart, 16 at a time. The products and the order of their
/// sums are those of `score_panel`.
inline void score_keys(const Group* queries, int64_t rows, int64_t width,
                       const BFloat16* const* keys, int64_t shift, int64_t stride, Ahead ahead,
                       float* scores) {
  PassRegisters registers;
  registers.set_rows(kTileRows);
  settle_memory();
  for (int64_t j = 0; j < kFeatures; j += kTileRows) {
    const BFloat16* first = keys[j] + shift;
    _tile_zero(0);
    for (int64_t d = 0; d < width; d += 2 * kTileRows) {
      _tile_loadd(4, first + d, stride * sizeof(BFloat16));
      _tile_loadd(6, queries + d / 2 * kFewRows, kFewRows * sizeof(Group));
      _tile_dpbf16ps(0, 4, 6);
      for (int64_t key = j; key < j + kTileRows; ++key) ahead.fetch(key, d);
    }
    alignas(64) float by_key[kTileRows][kFewRows];
    _tile_stored(0, by_key, sizeof(by_key[0]));
    settle_memory();
    Vec<float> by_row[kTileRows];
    std::memcpy(by_row, by_key, sizeof(by_key));
    transpose<float>(by_row);
    for (int64_t r = 0; r < rows; ++r) store(scores + r * kSplit + j, by_row[r]);
  }
}

/// scores[r][0..32) = queries[r] . keys of one packed panel.
inline void score_panel(const BFloat16* queries, int64_t rows, int64_t width, const Group* panel,
                        float* scores) {
  for_passes(rows, [&](int64_t row, int64_t count) {
    alignas(64) TileSums<kMostRows> sums;
    multiply_rows(dense_rows(queries, width).from(row, 0, width / 2), count, panel, {}, sums);
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(scores + (row + r) * kSplit, sums[r], sizeof(sums[r]));
    }
  });
}

/// out[r][0..32) = sum over `range`, of whole panels, of weights[r][j] * values[j], in order.
inline void add_values(const BFloat16* high, const BFloat16* low, int64_t rows, Range range,
                       const Group* tile, float* out, int64_t out_stride) {
  const int64_t first = range.begin / 2, groups = range.size() / 2;
  for_passes(rows, [&](int64_t row, int64_t count) {
    alignas(64) TileSums<kMostRows> sums;
    zero_sums(count);
    for (const BFloat16* part : {high, low}) {
      add_rows(dense_rows(part, kSplit).from(row, first, groups), count, tile + first * kFeatures,
               {});
    }
    store_sums(sums, count);
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(out + (row + r) * out_stride, sums[r], sizeof(sums[r]));
    }
  });
}

}  // namespace mtpc
