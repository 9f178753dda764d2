// The inner loops of attention: a few rows against one split of keys and values.
//
// A is the accumulation type, T the cache's. Each row's result is computed by the same sequence
// of operations in every instance, so that it does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "simd.h"

namespace mtpc {

/// Keys of one panel: a packed block of keys that the score loop reads by dimension.
template <class A>
inline constexpr int64_t kPanel = 2 * kLanes<A>;

/// Calls body(integral_constant R, first row) for tiles of 8, 4, 2 and 1 rows.
template <class Body>
inline void for_row_tiles(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; rows - row >= 8; row += 8) body(std::integral_constant<int, 8>{}, row);
  if (rows - row >= 4) body(std::integral_constant<int, 4>{}, row), row += 4;
  if (rows - row >= 2) body(std::integral_constant<int, 2>{}, row), row += 2;
  if (rows - row >= 1) body(std::integral_constant<int, 1>{}, row);
}

/// panel[d][j] = keys[j][shift + d], zeros where keys[j] is null: a key that no row sees is not read.
template <class A, class T>
void pack_panel(const T* const* keys, int64_t shift, int64_t width, A* panel) {
  constexpr int kN = kLanes<A>;
  for (int64_t d = 0; d < width; d += kN) {
    const int64_t valid = std::min<int64_t>(kN, width - d);
    for (int part = 0; part < 2; ++part) {
      Vec<A> square[kN];
      for (int j = 0; j < kN; ++j) {
        const T* key = keys[part * kN + j];
        square[j] = key == nullptr ? Vec<A>{}
            : valid == kN          ? load<A>(key + shift + d)
                                   : load_first<A>(key + shift + d, valid);
      }
      transpose<A>(square);
      for (int i = 0; i < valid; ++i) store(panel + (d + i) * kPanel<A> + part * kN, square[i]);
    }
  }
}

/// scores[r][j] = q[r] . panel[:, j] for kTile rows and one panel of keys.
template <int kTile, class A>
void score_tile(const A* q, int64_t width, const A* panel, A* scores) {
  constexpr int kN = kLanes<A>;
  Vec<A> low[kTile]{}, high[kTile]{};
  for (int64_t d = 0; d < width; ++d) {
    const Vec<A> key_low = load<A>(panel + d * kPanel<A>);
    const Vec<A> key_high = load<A>(panel + d * kPanel<A> + kN);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
      low[r] += q[r * width + d] * key_low;
      high[r] += q[r * width + d] * key_high;
    }
  }
  for (int r = 0; r < kTile; ++r) {
    store(scores + r * kSplit, low[r]);
    store(scores + r * kSplit + kN, high[r]);
  }
}

/// A row's share of the normalisation: the largest score and the sum of exp(score - peak).
template <class A>
struct Norm {
  A peak, total;
};

/// What is subtracted before exp; a row that sees nothing has peak -inf, and -inf - -inf is NaN.
template <class A>
inline A finite_peak(A peak) {
  return peak == -kInfinity<A> ? A(0) : peak;
}

/// The scales of a head's keys and values at a split's positions; null where caches hold no codes.
template <class A>
struct Scales {
  const A *keys, *values;
};

/// One register of a row's scores, times the scales; -inf where the row does not see.
template <class A>
__attribute__((always_inline)) inline Vec<A> scaled_score(const A* scores, int64_t j, Range seen, A scale, A softcap,
                           Scales<A> scales) {
  using Lane = std::remove_reference_t<decltype(Mask<A>{}[0])>;
  Vec<A> score = load<A>(scores + j) * scale;
  if (scales.keys) score *= load<A>(scales.keys + j);
  if (softcap > 0) score = softcap * tanh(score / softcap);
  if (j >= seen.begin && j + kLanes<A> <= seen.end) return score;
  const Lane first = seen.begin - j, last = seen.end - j - 1;
  const Mask<A> lane = lane_numbers<A>();
  return (lane >= first) & (lane <= last) ? score : Vec<A>{} - kInfinity<A>;
}

/// Turns one row's products into weights exp(score - peak), exact zeros where it does not see.
/// `range` (whole panels) is all that was computed; both ranges count from the split's begin.
/// Weights of codes are those of their values, times the values' scales. keep(j, weights) takes two
/// registers of them, of the panel at j.
template <class A, class Keep>
Norm<A> weigh_row(A* scores, Range range, Range seen, A scale, A softcap, Scales<A> scales,
                  const Keep& keep) {
  Vec<A> peaks = Vec<A>{} - kInfinity<A>;
  for (int64_t j = range.begin; j < range.end; j += kLanes<A>) {
    const Vec<A> score = scaled_score<A>(scores, j, seen, scale, softcap, scales);
    peaks = score > peaks ? score : peaks;
    store(scores + j, score);
  }
  const A peak = max_lanes<A>(peaks);
  Vec<A> totals{};
  const auto weigh = [&](int64_t j) {
    const Vec<A> weight = exp_nonpositive(load<A>(scores + j) - finite_peak(peak));
    totals += weight;
    return scales.values ? weight * load<A>(scales.values + j) : weight;
  };
  for (int64_t j = range.begin; j < range.end; j += kPanel<A>) {
    const Vec<A> weights[2]{weigh(j), weigh(j + kLanes<A>)};
    keep(j, weights);
  }
  return {peak, sum_lanes<A>(totals)};
}

/// Up to kVecs registers of one value row, `valid` elements of them inside the row.
template <int kVecs, class A, class T>
inline void load_values(const T* value, int64_t valid, Vec<A> (&out)[kVecs]) {
#pragma GCC unroll 4
  for (int i = 0; i < kVecs; ++i) {
    const int64_t left = valid - i * kLanes<A>;
    out[i] = left >= kLanes<A> ? load<A>(value + i * kLanes<A>)
                               : load_first<A>(value + i * kLanes<A>, left);
  }
}

/// out[r][0..kVecs registers) += sum over keys of weights[r][key] * values[key], in key order.
template <int kTile, int kVecs, class A, class T>
void value_tile(const A* weights, const T* const* values, int64_t shift, Range keys, int64_t valid,
                A* out, int64_t out_stride) {
  Vec<A> sums[kTile][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load<A>(out + r * out_stride + i * kLanes<A>);
  }
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    Vec<A> value[kVecs];
    load_values<kVecs, A>(values[key] + shift, valid, value);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) sums[r][i] += weights[r * kSplit + key] * value[i];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) store(out + r * out_stride + i * kLanes<A>, sums[r][i]);
  }
}

/// All columns of value_tile; values begin at `shift`, out rows are padded to whole registers.
template <int kTile, class A, class T>
void value_row_tile(const A* weights, const T* const* values, int64_t shift, Range keys,
                    int64_t width, A* out, int64_t out_stride) {
  constexpr int kN = kLanes<A>;
  int64_t column = 0;
  for (; column + 2 * kN <= width; column += 2 * kN) {
    value_tile<kTile, 2>(
        weights, values, shift + column, keys, 2 * kN, out + column, out_stride);
  }
  for (; column < width; column += kN) {
    value_tile<kTile, 1>(
        weights, values, shift + column, keys, width - column, out + column, out_stride);
  }
}

}  // namespace mtpc
