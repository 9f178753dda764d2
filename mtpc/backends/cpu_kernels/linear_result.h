// Where a linear layer's sums go.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "product_rows.h"

namespace mtpc {

/// A layer's bias in float, if it has one.
class Biases {
 public:
  Biases(const std::optional<Tensor>& bias, int64_t features) : values_(bias ? features : 0) {
    if (bias) read(values_.data(), adjacent_last(*bias), 0, features);
  }

  const float* get() const { return values_.empty() ? nullptr : values_.data(); }

 private:
  std::vector<float> values_;
};

/// Rows of so many features, `stride` apart.
struct LinearResult {
  const float* bias;  // may be null
  BFloat16* out;
  int64_t features, stride;

  /// Rounds a tile's sums to their place.
  void put(int64_t tile, int64_t row, const float* sums) const {
    const int64_t begin = tile * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    BFloat16* to = out + row * stride + begin;
    if (count == kFeatures && !bias) return narrow_sums<kFeatures>(to, sums);
    for (int64_t f = 0; f < count; ++f) {
      to[f] = static_cast<BFloat16>(sums[f] + (bias ? bias[begin + f] : 0.0f));
    }
  }
};

}  // namespace mtpc
