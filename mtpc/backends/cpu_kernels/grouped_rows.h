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

/// Whether bytes are multiplied as integers of 16 bits, because AVX2 has no instruction that adds
/// products of bytes exactly. Four int8 of a row are then two pairs of int16: the even ones, and the
/// odd ones.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline constexpr bool kBytesAsPairs = true;
#else
inline constexpr bool kBytesAsPairs = false;
#endif

/// Determines how rows are prepared: the kind of codes, the inputs that share a scale, and the zero
/// point of all groups. Where groups have zero points or minima of their own, `zero` is 1, and the
/// offsets of rows are multiplied by those.
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

/// Packed codes of `tiles` tiles, their scales, and their zero points or minima.
struct GroupedWeight {
  GroupForm form;
  int64_t tiles;
  const char* codes;
  const char* scales;
  ScalarType scale_type;
  const char* zeros;  // may be null
  bool has_mins;      // whether these are minima, of the scales' type

  int64_t scale_bytes() const { return scale_type == ScalarType::Float ? 4 : 2; }

  int64_t zero_bytes() const { return has_mins ? scale_bytes() : 1; }

  /// Bytes of a tile's codes.
  int64_t tile_bytes() const { return form.steps() * kGroupBytes; }

  /// The tile's own, as a weight of one tile; or of `count`.
  GroupedWeight from(int64_t tile, int64_t count = 1) const {
    const int64_t scales_before = tile * form.groups() * kFeatures;
    return {form, count, codes + tile * tile_bytes(), scales + scales_before * scale_bytes(),
            scale_type, zeros ? zeros + scales_before * zero_bytes() : nullptr, has_mins};
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
    fits = !is_float && (zeros->scalar_type() == ScalarType::Byte || zeros->scalar_type() == type) &&
        is_of_tiles(*zeros, 3) && zeros->size(lead + 1) == groups;
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
          zeros ? static_cast<const char*>(zeros->const_data_ptr()) : nullptr,
          zeros && zeros->scalar_type() == type};
}

/// Rows for products with weights of one form: rounded to int8, each group of inputs with a step of
/// its own; or as floats, for codes of float8.
class GroupedRows {
 public:
  GroupedRows() = default;
  GroupedRows(int64_t rows, const GroupForm& form) { reserve(rows, form); }

  /// Makes room for `rows` rows of a form. The caller sets them.
  void reserve(int64_t rows, const GroupForm& form) {
    form_ = form;
    rows_ = rows;
    stride_ = spaced(form.inputs * form.input_bytes());
    bytes_.reserve(rows * stride_);
    if (is_float()) return;
    steps_.reserve(rows * form.groups());
    offsets_.reserve(rows * form.groups());
  }

  /// The bytes of row r: of int8, of pairs of int16, or of floats.
  const char* row(int64_t r) const { return bytes_.get() + r * stride_; }

  /// The value of an integer 1 in each row's group; those of all rows lie side by side.
  const float* steps(int64_t group) const { return steps_.get() + group * rows_; }

  /// Minus the sum of each row's integers of a group, times the form's zero; in the same order.
  const int32_t* offsets(int64_t group) const { return offsets_.get() + group * rows_; }

  const GroupForm& form() const { return form_; }
  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }

  /// Takes `from`, as many numbers as the form has inputs, as row r. Different rows may be set on
  /// different threads.
  template <class T>
  void set(int64_t r, const T* from) const {
    set_some(r, 0, form_.inputs, from);
  }

  /// Whether so many adjacent inputs, after others of that many, can be set on their own.
  bool takes(int64_t count) const { return is_float() || count % form_.group == 0; }

  /// Takes `count` inputs of row r, from `first` on, as `set` takes all; see `takes`.
  template <class T>
  void set_some(int64_t r, int64_t first, int64_t count, const T* from) const {
    char* to = bytes_.get() + r * stride_ + first * form_.input_bytes();
    if (is_float()) {
      float* numbers = reinterpret_cast<float*>(to);
      std::transform(from, from + count, numbers, [](T x) { return static_cast<float>(x); });
      return;
    }
    for (int64_t i = 0; i < count; i += form_.group) {
      const int64_t group = (first + i) / form_.group;
      round_group(group * rows_ + r, from + i, to + i * form_.input_bytes());
    }
  }

  /// Row r becomes a copy of another's.
  void copy(int64_t r, const GroupedRows& from, int64_t other) const {
    std::memcpy(bytes_.get() + r * stride_, from.row(other), stride_);
    if (is_float()) return;
    for (int64_t g = 0; g < form_.groups(); ++g) {
      steps_.get()[g * rows_ + r] = from.steps(g)[other];
      offsets_.get()[g * rows_ + r] = from.offsets(g)[other];
    }
  }

 private:
  /// Inputs of a group whose largest magnitude is smaller count as zeros: 127 divided by it might
  /// not be a float.
  static constexpr float kTiny = 0x1p-100f;
  static constexpr float kLargestCode = 127;

  bool is_float() const { return form_.kind == CodeKind::kFloat8; }

  template <class T>
  void round_group(int64_t at, const T* from, char* to) const {
    const float largest = largest_magnitude(from, form_.group);
    const float inverse = largest < kTiny ? 0 : kLargestCode / largest;
    Mask<float> totals{};
    const bool as_pairs = kBytesAsPairs && form_.kind == CodeKind::kInt8;
    for_inlined_steps(form_.group, [&](int64_t i, auto count) __attribute__((always_inline)) {
      const Mask<float> integers = round_to_integers(take(from + i, count) * inverse);
      if (as_pairs) {
        put_pairs(to + i * static_cast<int64_t>(sizeof(int16_t)), integers, count);
      } else {
        put_bytes(to + i, integers, count);
      }
      totals += integers;
    });
    // A group with an infinity is not a number, as one with NaN is.
    steps_.get()[at] = largest / kLargestCode + (largest - largest);
    offsets_.get()[at] = -form_.zero *
        reduce_integers(totals, [](Mask<float> a, Mask<float> b) { return a + b; });
  }

  /// The first `count` lanes, none of which needs more than a byte.
  template <class Count>
  static void put_bytes(char* to, Mask<float> integers, Count count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i words = words_of(integers);
    const __m128i both = _mm_packs_epi16(words, words);
    std::memcpy(to, &both, count);
#else
    typedef int8_t Bytes __attribute__((vector_size(kStep)));
    const Bytes bytes = __builtin_convertvector(integers, Bytes);
    std::memcpy(to, &bytes, count);
#endif
  }

  /// The same as int16, of each four the even ones before the odd ones; `count` is a multiple of
  /// four.
  template <class Count>
  static void put_pairs(char* to, Mask<float> integers, Count count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr int kEvenFirst = _MM_SHUFFLE(3, 1, 2, 0);
    const __m128i pairs =
        _mm_shufflehi_epi16(_mm_shufflelo_epi16(words_of(integers), kEvenFirst), kEvenFirst);
    std::memcpy(to, &pairs, count * sizeof(int16_t));
#else
    static_cast<void>(to), static_cast<void>(integers), static_cast<void>(count);
#endif
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  static __m128i words_of(Mask<float> integers) {
    const __m256i all = (__m256i)integers;
    return _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  }
#endif

  GroupForm form_{};
  int64_t rows_ = 0, stride_ = 0;
  Buffer<char> bytes_;
  Buffer<float> steps_;      // [groups, rows]
  Buffer<int32_t> offsets_;  // the same
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
