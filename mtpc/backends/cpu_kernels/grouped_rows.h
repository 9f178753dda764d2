// Weights with a scale for each group of inputs, and rows for products with them. See
// mtpc/weights/grouped.py and mtpc/ops/grouped.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "product_rows.h"
#include "row_steps.h"

namespace mtpc {

enum class CodeKind { kInt4, kInt8, kFloat8 };

/// Whether bytes are multiplied as integers of 16 bits: without instructions for pairs of bytes of
/// any size. Then each four of a row's int8 are two pairs of int16: the even ones, and the odd.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline constexpr bool kBytesAsPairs = true;
#else
inline constexpr bool kBytesAsPairs = false;
#endif

/// What decides how rows are prepared: the kind of codes, the inputs that share a scale, and the
/// zero point of all groups. Where groups have zero points of their own, `zero` is 1: what theirs
/// is multiplied by.
struct GroupForm {
  CodeKind kind;
  int64_t inputs, group;
  int32_t zero;

  int64_t groups() const { return inputs / group; }

  /// Groups of 32 bits of each feature.
  int64_t steps() const { return inputs / (kind == CodeKind::kInt4 ? 8 : 4); }

  /// Bytes that an input takes in a row.
  int64_t input_bytes() const {
    if (kind == CodeKind::kFloat8) return sizeof(float);
    return kBytesAsPairs && kind == CodeKind::kInt8 ? sizeof(int16_t) : sizeof(int8_t);
  }
};

/// Packed codes of `tiles` tiles, their scales and zero points.
struct GroupedWeight {
  GroupForm form;
  int64_t tiles;
  const char* codes;
  const char* scales;
  ScalarType scale_type;
  const uint8_t* zeros;  // may be null

  int64_t scale_bytes() const { return scale_type == ScalarType::Float ? 4 : 2; }

  /// Bytes of a tile's codes.
  int64_t tile_bytes() const { return form.steps() * kGroupBytes; }

  /// The tile's own, as a weight of one tile; or of `count`.
  GroupedWeight from(int64_t tile, int64_t count = 1) const {
    const int64_t scales_before = tile * form.groups() * kFeatures;
    return {form, count, codes + tile * tile_bytes(), scales + scales_before * scale_bytes(),
            scale_type, zeros ? zeros + scales_before : nullptr};
  }
};

/// Reads a weight of so many features, checked against its shapes; `stack` is how many of them lie
/// one behind another in a dimension before the tiles, or 0 where there is no such dimension.
inline GroupedWeight grouped_weight(
    const char* name, const Tensor& codes, const Tensor& scales,
    const std::optional<Tensor>& zeros, int64_t stack, int64_t features, int64_t inputs) {
  const int64_t lead = stack > 0 ? 1 : 0, tiles = count_tiles(features);
  const bool is_float = codes.scalar_type() == ScalarType::Float8_e4m3fn;
  const ScalarType type = scales.scalar_type();
  const auto is_of_tiles = [&](const Tensor& t, int64_t dims) {
    return t.dim() == lead + dims && t.is_contiguous() && (!lead || t.size(0) == stack) &&
        t.size(lead) == tiles && t.size(lead + 2) == kFeatures;
  };
  bool fits = (is_float || codes.scalar_type() == ScalarType::Byte) && is_of_tiles(codes, 4) &&
      codes.size(lead + 3) == 4 && is_of_tiles(scales, 3) &&
      (type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float);
  const int64_t steps = fits ? codes.size(lead + 1) : 0, groups = fits ? scales.size(lead + 1) : 0;
  fits = fits && steps > 0 && groups > 0 && inputs % groups == 0 &&
      (inputs == 4 * steps || (inputs == 8 * steps && !is_float)) &&
      inputs / groups % (inputs / steps) == 0;
  if (fits && zeros) {
    fits = !is_float && zeros->scalar_type() == ScalarType::Byte && is_of_tiles(*zeros, 3) &&
        zeros->size(lead + 1) == groups;
  }
  STD_TORCH_CHECK(
      fits, "mtpc_cpu: ", name, ": codes and scales of ", features, " features do not fit ", inputs,
      " inputs: expected codes [..., ceil(N / 32), K / 8 or K / 4, 32, 4], scales and zeros [..., "
      "ceil(N / 32), K / group, 32]");
  const CodeKind kind = is_float ? CodeKind::kFloat8
      : inputs == 8 * steps      ? CodeKind::kInt4
                                 : CodeKind::kInt8;
  const int32_t zero = zeros || is_float ? 1 : kind == CodeKind::kInt4 ? 8 : 128;
  return {{kind, inputs, inputs / groups, zero},
          tiles * std::max<int64_t>(stack, 1),
          static_cast<const char*>(codes.const_data_ptr()),
          static_cast<const char*>(scales.const_data_ptr()),
          type,
          zeros ? static_cast<const uint8_t*>(zeros->const_data_ptr()) : nullptr};
}

/// Rows for products with weights of one form: rounded to int8, each group of inputs with a step of
/// its own; or as floats, for codes of float8.
class GroupedRows {
 public:
  GroupedRows() = default;
  GroupedRows(int64_t rows, const GroupForm& form) { reserve(rows, form); }

  /// Makes room for so many rows of a form; they are to be set.
  void reserve(int64_t rows, const GroupForm& form) {
    form_ = form;
    stride_ = spaced(form.inputs * form.input_bytes());
    bytes_.reserve(rows * stride_);
    if (is_float()) return;
    steps_.reserve(rows * form.groups());
    offsets_.reserve(rows * form.groups());
  }

  /// The bytes of row r: of int8, of pairs of int16, or of floats.
  const char* row(int64_t r) const { return bytes_.get() + r * stride_; }

  /// What an integer of each group of row r stands for.
  const float* steps(int64_t r) const { return steps_.get() + r * form_.groups(); }

  /// The sum of each group's integers, times the form's zero.
  const int32_t* offsets(int64_t r) const { return offsets_.get() + r * form_.groups(); }

  const GroupForm& form() const { return form_; }
  int64_t stride() const { return stride_; }

  /// Takes `from`, as many numbers as the form has inputs, as row r. Different rows may be set on
  /// different threads.
  template <class T>
  void set(int64_t r, const T* from) const {
    char* to = bytes_.get() + r * stride_;
    if (is_float()) {
      float* numbers = reinterpret_cast<float*>(to);
      std::transform(from, from + form_.inputs, numbers, [](T x) { return static_cast<float>(x); });
      return;
    }
    for (int64_t g = 0; g < form_.groups(); ++g) {
      const int64_t first = g * form_.group;
      round_group(r * form_.groups() + g, from + first, to + first * form_.input_bytes());
    }
  }

  /// Row r becomes a copy of another's.
  void copy(int64_t r, const GroupedRows& from, int64_t other) const {
    std::memcpy(bytes_.get() + r * stride_, from.row(other), stride_);
    if (is_float()) return;
    std::copy_n(from.steps(other), form_.groups(), steps_.get() + r * form_.groups());
    std::copy_n(from.offsets(other), form_.groups(), offsets_.get() + r * form_.groups());
  }

 private:
  /// Inputs of a group whose largest magnitude is smaller count as zeros: 127 divided by it might
  /// not be a float.
  static constexpr float kTiny = 0x1p-100f;
  static constexpr float kLargestCode = 127;

  bool is_float() const { return form_.kind == CodeKind::kFloat8; }

  template <class T>
  void round_group(int64_t at, const T* from, char* to) const {
    // Magnitudes as integers are in the same order, and NaN is the largest.
    Mask<float> magnitudes{};
    for_steps(form_.group, [&](int64_t i, auto count) {
      const Mask<float> magnitude =
          reinterpret_cast<Mask<float>>(take(from + i, count)) & 0x7fffffff;
      magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    });
    const Vec<float> numbers = reinterpret_cast<Vec<float>>(magnitudes);
    const float largest = reduce_lanes<float>(numbers, [](Vec<float> a, Vec<float> b) {
      const auto is_larger = reinterpret_cast<Mask<float>>(a) > reinterpret_cast<Mask<float>>(b);
      return is_larger ? a : b;
    });
    const float inverse = largest < kTiny ? 0 : kLargestCode / largest;
    Mask<float> totals{};
    for_steps(form_.group, [&](int64_t i, auto count) {
      const Mask<float> integers = round_to_integers(take(from + i, count) * inverse);
      put_integers(to + i * form_.input_bytes(), integers, count);
      totals += integers;
    });
    int32_t total = 0;
    for (int lane = 0; lane < kStep; ++lane) total += totals[lane];
    steps_.get()[at] = largest / kLargestCode;
    offsets_.get()[at] = total * form_.zero;
  }

  /// The first `count` lanes, a multiple of four, none of which needs more than a byte.
  void put_integers(char* to, Mask<float> integers, int count) const {
    if (kBytesAsPairs && form_.kind == CodeKind::kInt8) {
      typedef int16_t Pairs __attribute__((vector_size(2 * kStep)));
      const Pairs in_order = __builtin_convertvector(integers, Pairs);
      Pairs pairs;
      for (int lane = 0; lane < kStep; ++lane) {
        constexpr int kPlace[] = {0, 2, 1, 3};
        pairs[lane] = in_order[lane / 4 * 4 + kPlace[lane % 4]];
      }
      std::memcpy(to, &pairs, count * sizeof(int16_t));
    } else {
      typedef int8_t Bytes __attribute__((vector_size(kStep)));
      const Bytes bytes = __builtin_convertvector(integers, Bytes);
      std::memcpy(to, &bytes, count);
    }
  }

  GroupForm form_{};
  int64_t stride_ = 0;
  Buffer<char> bytes_;
  Buffer<float> steps_;
  Buffer<int32_t> offsets_;
};

/// Sets the rows of a dense tensor of any floating-point dtype, on torch's threads if they are many.
inline void set_rows(const GroupedRows& to, const Tensor& x, int64_t rows) {
  const int64_t inputs = to.form().inputs;
  with_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    run_tasks(rows, worker_count(rows * inputs), [&](int64_t r) { to.set(r, from + r * inputs); });
  });
}

}  // namespace mtpc
