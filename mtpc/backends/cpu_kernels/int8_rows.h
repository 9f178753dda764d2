// Rows rounded to int8, each with a step of its own, for products with packed int8 weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "row_steps.h"

namespace mtpc {

/// As in mtpc/weights/packing.py: the largest magnitude, and what stands for zero in weights.
inline constexpr float kLargest = 127;
inline constexpr int32_t kZero = 128;

class Int8Rows {
 public:
  Int8Rows(int64_t rows, int64_t inputs)
      : inputs_(inputs), integers_(rows * inputs), steps_(rows), offsets_(rows) {}

  const int8_t* row(int64_t r) const { return integers_.get() + r * inputs_; }

  /// Rounds `from`, `inputs` numbers, to row r. Different rows may be set on different threads.
  template <class T>
  void set(int64_t r, const T* from) {
    Vec<float> magnitudes{};
    for_steps(inputs_, [&](int64_t i, auto count) {
      const Vec<float> x = take(from + i, count), magnitude = x < 0.0f ? -x : x;
      magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    });
    const float largest = max_lanes<float>(magnitudes);
    const float inverse = largest == 0 ? 0 : kLargest / largest;
    int8_t* to = integers_.get() + r * inputs_;
    Mask<float> totals{};
    for_steps(inputs_, [&](int64_t i, auto count) {
      const Mask<float> integers = round_to_integers(take(from + i, count) * inverse);
      put_bytes(to + i, integers, count);
      totals += integers;
    });
    int32_t total = 0;
    for (int lane = 0; lane < kStep; ++lane) total += totals[lane];
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
  /// The first `count` lanes, none of which needs more than a byte.
  static void put_bytes(int8_t* to, Mask<float> integers, int count) {
    typedef int8_t Bytes __attribute__((vector_size(kStep)));
    const Bytes bytes = __builtin_convertvector(integers, Bytes);
    std::memcpy(to, &bytes, count);
  }

  int64_t inputs_;
  Buffer<int8_t> integers_;
  std::vector<float> steps_;
  std::vector<int32_t> offsets_;  // what the weights' zero adds to each sum
};

/// The rows of a dense tensor of any floating-point dtype.
inline Int8Rows round_rows(const Tensor& x, int64_t rows, int64_t inputs) {
  Int8Rows rounded(rows, inputs);
  with_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    for (int64_t r = 0; r < rows; ++r) rounded.set(r, from + r * inputs);
  });
  return rounded;
}

}  // namespace mtpc
