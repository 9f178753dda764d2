// Writes a linear layer's sums to its result.
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
    round(tile, sums, out + row * stride + tile * kFeatures);
  }

  /// Rounds a tile's sums to another place; returns how many of them are features.
  int64_t round(int64_t tile, const float* sums, BFloat16* to) const {
    const int64_t begin = tile * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    if (count == kFeatures && !bias) {
      narrow_sums<kFeatures>(to, sums);
    } else {
      for (int64_t f = 0; f < count; ++f) {
        to[f] = static_cast<BFloat16>(sums[f] + (bias ? bias[begin + f] : 0.0f));
      }
    }
    return count;
  }
};

}  // namespace mtpc
