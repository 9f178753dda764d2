// Root mean square normalisation of a row. See mtpc/ops/fused.py.
#pragma once

#include <cmath>

#include "row_steps.h"

namespace mtpc {

struct Norm {
  const BFloat16* weight;
  int64_t width;
  float epsilon;
  bool plus_one;

  /// out = the norm of `row`. Adds up lane by lane, then across lanes, for each row alike.
  void operator()(const BFloat16* row, BFloat16* out) const {
    Vec<float> squares{};
    for_steps(width, [&](int64_t i, auto count) {
      const Vec<float> x = take(row + i, count);
      squares += x * x;
    });
    const float mean = sum_lanes<float>(squares) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + epsilon);
    for_steps(width, [&](int64_t i, auto count) {
      const Vec<float> x = take(row + i, count) * scale, w = take(weight + i, count);
      put(out + i, plus_one ? x * (w + 1.0f) : round_bf16(x) * w, count);
    });
  }

  /// sums = a + b, in bfloat16, and out their norm; sums may be one of both.
  void of_sum(const BFloat16* a, const BFloat16* b, BFloat16* sums, BFloat16* out) const {
    for_steps(width, [&](int64_t i, auto count) {
      put(sums + i, take(a + i, count) + take(b + i, count), count);
    });
    (*this)(sums, out);
  }
};

}  // namespace mtpc
