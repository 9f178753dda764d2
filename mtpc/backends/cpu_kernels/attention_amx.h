// Attention's products in AMX's tile registers: bfloat16 queries against bfloat16 caches.
//
// A split's values are packed by pairs of keys, as its keys are by pairs of dimensions
// (attention_pairs.h), and the rows of a unit share them. Few rows take the keys as they are.
// Weights of values are taken as the sum of two bfloat16, so that they keep 16 bits: rounded to one
// they would lose what float has over it. Each part has sums of its own, over the positions in
// order, and unseen positions add exact zeros. So a row's result depends neither on the rows beside
// it nor on where the unit's positions begin and end.
#pragma once

#include <algorithm>

#include "attention_pairs.h"
#include "tile_phases.h"

namespace mtpc {

/// tile[j] = the 32 dimensions from `column` on of the j-th pair of values in `range`, which begins and
/// ends with a pair; zeros where positions are outside of `local`. Of each 8 dimensions the first 4
/// are in the first half of a tile's row (`order_halves`). Two lines are fetched with each pair.
inline void pack_values(const BFloat16* const* values, Range range, Range local, int64_t column,
                        int64_t valid, LinesAhead& ahead, Group* tile) {
  const auto row = [&](int64_t j) {
    return j < local.begin || j >= local.end ? _mm512_setzero_si512()
                                             : (__m512i)load_groups(values[j] + column, valid);
  };
  for (int64_t j = range.begin; j < range.end; j += 2) {
    const __m512i first = row(j), second = row(j + 1);
    ahead.fetch<kLater>(2);
    _mm512_storeu_si512(tile, _mm512_unpacklo_epi16(first, second));
    _mm512_storeu_si512(tile + kTileRows, _mm512_unpackhi_epi16(first, second));
    tile += kFeatures;
  }
}

/// parts[0] + parts[1] = weights, to 16 bits, for the positions of `range`, which is of whole panels.
inline void split_weights(const float* weights, Range range, BFloat16* parts) {
  for (int64_t j = range.begin; j < range.end; j += kFeatures) {
    const __m512 first = _mm512_loadu_ps(weights + j), second = _mm512_loadu_ps(weights + j + 16);
    const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const auto widen_half = [](__m256i half) {
      return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    };
    const __m512 rest = first - widen_half(_mm512_castsi512_si256(high));
    const __m512 more = second - widen_half(_mm512_extracti64x4_epi64(high, 1));
    _mm512_storeu_si512(parts + j, high);
    _mm512_storeu_si512(parts + kSplit + j, (__m512i)_mm512_cvtne2ps_pbh(more, rest));
  }
}

/// Calls body(first row, count) for passes of up to 32 rows, the registers configured for them.
template <class Body>
void for_passes(PassRegisters& registers, int64_t rows, const Body& body) {
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

/// Keys k, k + kN, ... of 16, of each of which `from` has kN scores, in one register.
template <int kN>
inline Vec<float> load_keys(const float* from, int k) {
  const auto part = [&](int i) { return from + (k + i * kN) * kN; };
  if constexpr (kN == 16) {
    return load<float>(part(0));
  } else if constexpr (kN == 8) {
    const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(part(0)));
    return _mm512_insertf32x8(low, _mm256_loadu_ps(part(1)), 1);
  } else {
    static_assert(kN == 4);
    __m512 keys = _mm512_castps128_ps512(_mm_loadu_ps(part(0)));
    keys = _mm512_insertf32x4(keys, _mm_loadu_ps(part(1)), 1);
    keys = _mm512_insertf32x4(keys, _mm_loadu_ps(part(2)), 2);
    return _mm512_insertf32x4(keys, _mm_loadu_ps(part(3)), 3);
  }
}

/// scores[r][j] = by_key[j][r] for 16 keys of kN rows.
template <int kN>
inline void turn_scores(const float* by_key, int64_t rows, float* scores) {
  Vec<float> by_row[kN];
#pragma GCC unroll 16
  for (int k = 0; k < kN; ++k) by_row[k] = load_keys<kN>(by_key, k);
  if constexpr (kN == 16) {
    transpose<float>(by_row);
  } else {
    swap_blocks<float, kN / 2>(by_row);
  }
  for (int64_t r = 0; r < rows; ++r) store(scores + r * kSplit, by_row[r]);
}

/// scores[r][j] = queries[r] . keys[j], for up to kN rows, packed, and the positions of `range`, of
/// whole panels. Keys are inputs of the product and lie `stride` elements apart, 16 at a time.
/// The products and the order of their sums are those of `score_panel`. `by_key` is memory for the
/// scores of all positions.
template <int kN>
void score_few(PassRegisters& registers, const Group* queries, int64_t rows, int64_t width,
               const BFloat16* const* keys, int64_t shift, int64_t stride, Range range,
               LinesAhead& ahead, float* by_key, float* scores) {
  registers.set_shape(kTileRows, kTileRows, kN);
  settle_memory();
  for (int64_t j = range.begin; j < range.end; j += 2 * kTileRows) {
    const BFloat16 *first = keys[j] + shift, *second = keys[j + kTileRows] + shift;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < width; d += 2 * kTileRows) {
      _tile_loadd(6, queries + d / 2 * kFewRows, kFewRows * sizeof(Group));
      _tile_loadd(4, first + d, stride * sizeof(BFloat16));
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second + d, stride * sizeof(BFloat16));
      _tile_dpbf16ps(1, 5, 6);
      ahead.fetch<kLater>(2 * kTileRows);
    }
    _tile_stored(0, by_key + j * kN, kN * sizeof(float));
    _tile_stored(1, by_key + (j + kTileRows) * kN, kN * sizeof(float));
  }
  settle_memory();
  for (int64_t j = range.begin; j < range.end; j += kTileRows) {
    turn_scores<kN>(by_key + j * kN, rows, scores + j);
  }
}

/// `score_few` with as few columns as hold the rows.
inline void score_keys(PassRegisters& registers, const Group* queries, int64_t rows, int64_t width,
                       const BFloat16* const* keys, int64_t shift, int64_t stride, Range range,
                       LinesAhead& ahead, float* by_key, float* scores) {
  const auto score = rows <= 4 ? score_few<4> : rows <= 8 ? score_few<8> : score_few<16>;
  score(registers, queries, rows, width, keys, shift, stride, range, ahead, by_key, scores);
}

/// scores[r][0..32) = queries[r] . keys of one packed panel.
inline void score_panel(PassRegisters& registers, const BFloat16* queries, int64_t rows,
                        int64_t width, const Group* panel, float* scores) {
  for_passes(registers, rows, [&](int64_t row, int64_t count) {
    alignas(64) TileSums<kMostRows> sums;
    multiply_rows(dense_rows(queries, width).from(row, 0, width / 2), count, panel, {}, sums);
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(scores + (row + r) * kSplit, sums[r], sizeof(sums[r]));
    }
  });
}

/// out[r][0..32) = the sums of both parts of each row.
inline void join_parts(const TileSums<kMostRows>& sums, int64_t rows, float* out,
                       int64_t out_stride) {
  constexpr int kN = kLanes<float>;
  settle_memory();
  for (int64_t r = 0; r < rows; ++r) {
    const float *first = sums[2 * r], *second = sums[2 * r + 1];
    Vec<float> both[2]{load<float>(first) + load<float>(second),
                       load<float>(first + kN) + load<float>(second + kN)};
    order_halves(both);
    std::memcpy(out + r * out_stride, both, sizeof(both));
  }
}

/// out[r][0..32) = the sums over `range`, of whole panels, of both parts of weights[r][j] * values[j],
/// each in order. `tile` has the values.
inline void add_values(PassRegisters& registers, const BFloat16* parts, int64_t rows, Range range,
                       const Group* tile, float* out, int64_t out_stride) {
  for_passes(registers, 2 * rows, [&](int64_t part, int64_t count) {
    alignas(64) TileSums<kMostRows> sums;
    const InputRows inputs =
        dense_rows(parts, kSplit).from(part, range.begin / 2, range.size() / 2);
    multiply_rows(inputs, count, tile, {}, sums);
    join_parts(sums, count / 2, out + part / 2 * out_stride, out_stride);
  });
}

}  // namespace mtpc
