// What rows do with scores: weights, weighted values and the merge of splits, in the form that the
// level takes for a cache.
#pragma once

#include <algorithm>

#include "attention_pairs.h"
#include "attention_tiles.h"

namespace mtpc {

/// The weights of one row, from its scores, for `add_weighted`: rounded to `narrow` where values are
/// added up by pairs of keys, while `lines` are fetched; else in place of the scores. See
/// `weigh_row`.
template <class F, class A>
__attribute__((always_inline)) inline Norm<A> weigh(
    bool by_pairs, A* scores, F* narrow, Range range, Range seen, A scale, A softcap,
    Scales<A> scales, LinesAhead& lines) {
  if constexpr (kValuePairs<A, F>) {
    LinesAhead ahead = lines;
    const auto keep_narrow = [&](int64_t j, const Vec<A> (&weights)[2]) {
      narrow_sums<kPanel<A>>(narrow + j, reinterpret_cast<const float*>(weights));
      ahead.template fetch<kLater>(2);
    };
    if (by_pairs) {
      const Norm<A> norm = weigh_row<A>(
          scores, range, seen, scale, softcap, scales, keep_narrow);
      lines = ahead;
      return norm;
    }
  }
  return weigh_row<A>(scores, range, seen, scale, softcap, scales,
                      [&](int64_t j, const Vec<A> (&weights)[2]) {
                        std::memcpy(scores + j, weights, sizeof(weights));
                      });
}

/// out[r] += sum over keys of weights[r][key] * values[key], in key order, for kTile rows, with the
/// weights that `weigh` made. Dimensions of sums have an order of their own until `order_sums`.
template <int kTile, class A, class F>
__attribute__((always_inline)) inline void add_weighted(
    bool by_pairs, const A* weights, const F* narrow, const F* const* values, int64_t shift,
    Range keys, int64_t width, LinesAhead* ahead, A* out, int64_t out_stride) {
  if constexpr (kValuePairs<A, F>) {
    if (by_pairs) {
      return value_row_pairs<kTile>(narrow, values, shift, keys, width, ahead, out, out_stride);
    }
  }
  if constexpr (kPairs<A, F>) {
    value_row_blocks<kTile>(weights, values, shift, keys, width, ahead, out, out_stride);
  } else {
    value_row_tile<kTile>(weights, values, shift, keys, width, out, out_stride);
  }
}

/// Brings the dimensions of a row of sums of `add_weighted` into their order.
template <class F, class A>
void order_sums(bool by_pairs, A* sums, int64_t stride) {
  if constexpr (kPairs<A, F>) {
    by_pairs ? order_pair_dimensions(sums, stride) : order_dimensions(sums, stride);
  }
}

/// What a sum over scores up to `peak` is multiplied by to be one up to `new_peak`.
template <class A>
A fade(A peak, A new_peak) {
  return exp(Vec<A>{} + (peak - finite_peak(new_peak)))[0];
}

/// A row's sums += those of another split, rescaled to the larger peak. Exactly nothing changes for a
/// row that sees nothing of the split: its factors are 1 and exp(-inf).
template <class A>
void absorb(A* sums, Norm<A>& norm, const A* more, Norm<A> other, int64_t stride) {
  const bool grows = other.peak > norm.peak;
  const A peak = grows ? other.peak : norm.peak;
  const A shrink = fade(grows ? norm.peak : other.peak, peak);
  const A keep = grows ? shrink : A(1), add = grows ? A(1) : shrink;
  for (int64_t d = 0; d < stride; ++d) sums[d] = sums[d] * keep + more[d] * add;
  norm = {peak, norm.total * keep + other.total * add};
}

/// A sink takes part in the normalisation only; returns the factor on the sums.
template <class A>
A add_sink(Norm<A>& norm, A sink) {
  const A peak = sink > norm.peak ? sink : norm.peak;
  const A keep = fade(norm.peak, peak);
  norm = {peak, norm.total * keep + fade(sink, peak)};
  return keep;
}

/// Divides a row's sums by its total; `keep` is a factor on them.
template <class A>
void normalise(A* sums, Norm<A> norm, A keep, int64_t stride) {
  if (norm.total != 0) keep /= norm.total;
  // Whether there was a split before says the sign of a zero, which the sum drops.
  for (int64_t d = 0; d < stride; ++d) sums[d] = sums[d] * keep + A(0);
}

}  // namespace mtpc
