// Rows rounded to int8, each with a step of its own, for products with packed int8 weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tensors.h"

namespace mtpc {

/// As in mtpc/packing.py: the largest magnitude, and what stands for zero in weights.
inline constexpr float kLargest = 127;
inline constexpr int32_t kZero = 128;

class Int8Rows {
 public:
  Int8Rows(int64_t rows, int64_t inputs)
      : inputs_(inputs), integers_(rows * inputs), steps_(rows), offsets_(rows) {}

  const int8_t* row(int64_t r) const { return integers_.get() + r * inputs_; }

  /// Rounds `from`, `inputs` numbers, to row r. Different rows may be set on different threads.
  void set(int64_t r, const float* from) {
    float largest = 0;
    for (int64_t i = 0; i < inputs_; ++i) largest = std::max(largest, std::abs(from[i]));
    const float inverse = largest == 0 ? 0 : kLargest / largest;
    int8_t* to = integers_.get() + r * inputs_;
    int32_t total = 0;
    for (int64_t i = 0; i < inputs_; ++i) {
      to[i] = static_cast<int8_t>(std::nearbyint(from[i] * inverse));
      total += to[i];
    }
    steps_[r] = largest / kLargest;
    offsets_[r] = total * kZero;
  }

  /// Row r becomes a copy of another's.
  void copy(int64_t r, const Int8Rows& from, int64_t other) {
    std::copy_n(from.row(other), inputs_, integers_.get() + r * inputs_);
    steps_[r] = from.steps_[other];
    offsets_[r] = from.offsets_[other];
  }

  /// What a sum of row r's products with a row of weights of this scale stands for.
  float value(int64_t r, int32_t sum, float scale) const {
    return static_cast<float>(sum - offsets_[r]) * (steps_[r] * scale);
  }

 private:
  int64_t inputs_;
  Buffer<int8_t> integers_;
  std::vector<float> steps_;
  std::vector<int32_t> offsets_;  // what the weights' zero adds to each sum
};

/// The rows of a dense tensor of any floating-point dtype.
inline Int8Rows round_rows(const Tensor& x, int64_t rows, int64_t inputs) {
  Int8Rows rounded(rows, inputs);
  std::vector<float> row(inputs);
  for (int64_t r = 0; r < rows; ++r) {
    read(row.data(), x, r * inputs, inputs);
    rounded.set(r, row.data());
  }
  return rounded;
}

}  // namespace mtpc
