// Loops over rows, a register of floats at a time.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "tensors.h"

namespace mtpc {

inline constexpr int kStep = kLanes<float>;

/// Calls body(i, count) for each register of `width` elements; the last may be partial.
template <class Body>
void for_steps(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) body(i, std::integral_constant<int, kStep>{});
  if (i < width) body(i, static_cast<int>(width - i));
}

/// The same, inlined, so that what the body adds up stays in registers.
template <class Body>
__attribute__((always_inline)) inline void for_inlined_steps(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) body(i, std::integral_constant<int, kStep>{});
  if (i < width) body(i, static_cast<int>(width - i));
}

/// Elements from p on: a register full of them where `count` is a constant.
template <class T>
Vec<float> take(const T* p, std::integral_constant<int, kStep>) {
  return load<float>(p);
}
template <class T>
Vec<float> take(const T* p, int count) {
  return load_first<float>(p, count);
}

/// The largest magnitude of some elements; not a number if one of them is not. As integers,
/// magnitudes have the same order, and NaN is the largest.
template <class T>
__attribute__((always_inline)) inline float largest_magnitude(const T* from, int64_t width) {
  Mask<float> magnitudes{};
  for_inlined_steps(width, [&](int64_t i, auto count) __attribute__((always_inline)) {
    magnitudes = larger(
        reinterpret_cast<Mask<float>>(take(from + i, count)) & 0x7fffffff, magnitudes);
  });
  const int32_t bits = reduce_integers(magnitudes, larger);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  return largest;
}

inline void put(BFloat16* p, Vec<float> v, std::integral_constant<int, kStep>) { narrow(p, v); }
inline void put(BFloat16* p, Vec<float> v, int count) {
  BFloat16 all[kStep];
  narrow(all, v);
  std::memcpy(p, all, count * sizeof(BFloat16));
}

/// silu(gate) * up; silu is rounded to bfloat16 before the product.
inline Vec<float> activate(Vec<float> gate, Vec<float> up) {
  return round_bf16(gate / (exp(-gate) + 1.0f)) * up;
}

/// The addresses of a tensor's rows, for any strides of its dimensions but the last.
class RowStarts {
 public:
  explicit RowStarts(const Tensor& t) : data_(static_cast<const BFloat16*>(t.const_data_ptr())) {
    for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
      sizes_.push_back(t.size(dim));
      strides_.push_back(t.stride(dim));
    }
  }

  const BFloat16* operator()(int64_t row) const {
    int64_t offset = 0;
    for (size_t dim = sizes_.size(); dim-- > 0; row /= sizes_[dim]) {
      offset += row % sizes_[dim] * strides_[dim];
    }
    return data_ + offset;
  }

 private:
  const BFloat16* data_;
  std::vector<int64_t> sizes_, strides_;
};

inline BFloat16* data(const Tensor& t) { return static_cast<BFloat16*>(t.mutable_data_ptr()); }

/// The multiply-adds of a product that take about as long as one element of such a loop.
inline constexpr int64_t kWork = 8;

}  // namespace mtpc
