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

/// How products take codes.
enum class CodeKind { kInt4, kInt8, kFloat8, kIq4, kE2m1 };

/// How weights store them; kIq4 and kE2m1 are places in tables.
enum class StoredCodes { kInt4, kInt5, kInt6, kInt8, kIq4, kE2m1, kFloat8 };

/// Inputs of a super-block, whose scales are small integers times a float16.
inline constexpr int64_t kSuper = 256;

/// Bytes of the float64 of a row that come before its scales, where these are float8 times that.
inline constexpr int64_t kRowBytes = 8;

/// Adjacent bytes of a row that is rounded: a line, and what a register of AMX takes of it.
inline constexpr int64_t kRowBlock = 64;

/// The zero point of bytes that tables give.
inline constexpr int kByteZero = 128;

/// Whether bytes are multiplied as integers of 16 bits, because AVX2 has no instruction that adds
/// products of bytes exactly. Four int8 of a row are then two pairs of int16: the even ones, and the
/// odd ones.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline constexpr bool kBytesAsPairs = true;
#else
inline constexpr bool kBytesAsPairs = false;
#endif

/// Whether products look up codes that are places in tables. With AVX2 sums would not fit 16 bits.
inline constexpr bool kLooksUp = kVectorBytes == 64;

/// Determines how rows are prepared: the kind of codes, the inputs that share a scale, and the zero
/// point of all groups. Where groups have zero points or minima of their own, `zero` is 1, and the
/// offsets of rows are multiplied by those.
struct GroupForm {
  CodeKind kind;
  int64_t inputs, group;
  int32_t zero;

  int64_t groups() const { return inputs / group; }

  /// Groups of 32 bits of each feature.
  int64_t steps() const {
    return inputs / (kind == CodeKind::kInt8 || kind == CodeKind::kFloat8 ? 4 : 8);
  }

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
  StoredCodes stored;
  int64_t bits;  // of a code
  const char* scales;
  ScalarType scale_type;  // Short: words of super-blocks; Byte: exponents; Char: in two levels
  int64_t scale_rows;     // of 32 elements, of a tile
  const char* zeros;      // may be null
  bool has_mins;          // whether these, or super-blocks, are minima: of the scales' type
  int64_t first = 0;      // the group of rows at which the codes begin
  const char* ahead = nullptr;  // of unpacked codes: memory to fetch while products use them
  int64_t ahead_bits = 8;       // of it for each code

  /// Whether products take codes as they are stored, and do not need bytes.
  bool keeps_codes() const {
    if (is_looked_up()) return kLooksUp;
    return stored == StoredCodes::kInt4 || bits == 8;
  }

  bool is_looked_up() const { return stored == StoredCodes::kIq4 || stored == StoredCodes::kE2m1; }

  /// Whether codes must be made bytes, or scales floats; see unpack.h.
  bool is_packed() const {
    return !keeps_codes() || scale_type == ScalarType::Short || scale_bytes() == 1;
  }

  /// Rows of scales before those of groups.
  int64_t row_bytes() const { return scale_type == ScalarType::Char ? kRowBytes : 0; }

  int64_t scale_bytes() const {
    const bool is_byte = scale_type == ScalarType::Byte || scale_type == ScalarType::Char;
    return scale_type == ScalarType::Float ? 4 : is_byte ? 1 : 2;
  }

  int64_t zero_bytes() const { return has_mins ? scale_bytes() : 1; }

  /// Bytes of a tile's codes.
  int64_t tile_bytes() const { return form.inputs * bits * kFeatures / 8; }

  /// The tile's own, as a weight of one tile; or of `count`.
  GroupedWeight from(int64_t tile, int64_t count = 1) const {
    GroupedWeight some = *this;
    some.tiles = count;
    some.codes += tile * tile_bytes();
    some.scales += tile * scale_rows * kFeatures * scale_bytes();
    if (zeros) some.zeros += tile * form.groups() * kFeatures * zero_bytes();
    return some;
  }
};

/// What a weight's dtypes and sizes say of its codes; false if they say nothing.
inline bool read_codes(ScalarType codes, int64_t steps, int64_t inputs, GroupedWeight& weight) {
  if (steps == 0 || 32 * steps % inputs != 0) return false;
  weight.bits = 32 * steps / inputs;
  const bool is_byte = codes == ScalarType::Byte;
  const auto is = [&](bool fits, StoredCodes stored, CodeKind kind, int32_t zero) {
    if (fits) weight.stored = stored, weight.form.kind = kind, weight.form.zero = zero;
    return fits;
  };
  if (weight.scale_bytes() == 1) {
    return is(weight.bits == 4 && is_byte, StoredCodes::kE2m1, CodeKind::kE2m1, kByteZero);
  }
  return is(weight.bits == 4 && is_byte, StoredCodes::kInt4, CodeKind::kInt4, 8) ||
      is(weight.bits == 5 && is_byte, StoredCodes::kInt5, CodeKind::kInt8, 16) ||
      is(weight.bits == 6 && is_byte, StoredCodes::kInt6, CodeKind::kInt8, 32) ||
      is(weight.bits == 8 && is_byte, StoredCodes::kInt8, CodeKind::kInt8, 128) ||
      is(weight.bits == 4 && codes == ScalarType::Char, StoredCodes::kIq4, CodeKind::kIq4,
         kByteZero) ||
      is(weight.bits == 8 && codes == ScalarType::Float8_e4m3fn, StoredCodes::kFloat8,
         CodeKind::kFloat8, 1);
}

/// The same of its scales: how many inputs share one, and whether super-blocks have minima.
inline bool read_scales(int64_t inputs, GroupedWeight& weight) {
  const int64_t rows = weight.scale_rows - weight.row_bytes();
  if (weight.scale_type != ScalarType::Short) {
    if (rows <= 0 || inputs % rows != 0) return false;
    weight.form.group = inputs / rows;
    return true;
  }
  if (inputs % kSuper != 0 || rows % (inputs / kSuper) != 0) return false;
  const int64_t words = rows / (inputs / kSuper);
  weight.form.group = words == 9 ? kSuper / 16 : kSuper / 8;
  weight.has_mins = words == 8;
  return words == 4 || words == 8 || words == 9;
}

/// Reads a weight of so many features, checked against its shapes; `stack` is how many of them lie
/// one behind another in a dimension before the tiles, or 0 where there is no such dimension.
inline GroupedWeight grouped_weight(
    const char* name, const Tensor& codes, const Tensor& scales,
    const std::optional<Tensor>& zeros, int64_t stack, int64_t features, int64_t inputs) {
  const int64_t lead = stack > 0 ? 1 : 0, tiles = count_tiles(features);
  const ScalarType type = scales.scalar_type();
  const auto is_of_tiles = [&](const Tensor& t, int64_t dims) {
    return t.dim() == lead + dims && t.is_contiguous() && (!lead || t.size(0) == stack) &&
        t.size(lead) == tiles && t.size(lead + 2) == kFeatures;
  };
  GroupedWeight weight{};
  weight.tiles = tiles * std::max<int64_t>(stack, 1);
  weight.scale_type = type;
  weight.form.inputs = inputs;
  bool fits = inputs > 0 && is_of_tiles(codes, 4) && codes.size(lead + 3) == 4 &&
      is_of_tiles(scales, 3) &&
      (type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float ||
       type == ScalarType::Byte || type == ScalarType::Short || type == ScalarType::Char);
  if (fits) {
    weight.scale_rows = scales.size(lead + 1);
    fits = read_codes(codes.scalar_type(), codes.size(lead + 1), inputs, weight) &&
        read_scales(inputs, weight);
  }
  const bool is_packed = fits && weight.is_packed();
  if (fits) {
    const int64_t unit = weight.bits == 5 ? 32 : weight.bits == 6 ? 16 : weight.bits == 4 ? 8 : 4;
    fits = weight.form.group % unit == 0 && (!is_packed || kSuper % weight.form.group == 0);
  }
  if (fits && zeros) {
    fits = weight.stored != StoredCodes::kFloat8 && type != ScalarType::Short &&
        type != ScalarType::Char &&
        (zeros->scalar_type() == ScalarType::Byte ? !is_packed : zeros->scalar_type() == type) &&
        is_of_tiles(*zeros, 3) && zeros->size(lead + 1) == weight.form.groups();
  }
  STD_TORCH_CHECK(
      fits, "mtpc_cpu: ", name, ": codes and scales of ", features, " features do not fit ", inputs,
      " inputs: expected codes [..., ceil(N / 32), K * bits / 32, 32, 4], scales and zeros [..., "
      "ceil(N / 32), K / group, 32]");
  weight.codes = static_cast<const char*>(codes.const_data_ptr());
  weight.scales = static_cast<const char*>(scales.const_data_ptr());
  if (zeros) {
    weight.zeros = static_cast<const char*>(zeros->const_data_ptr());
    weight.has_mins = zeros->scalar_type() == type;
  }
  if (zeros || weight.has_mins) weight.form.zero = 1;
  if (!weight.keeps_codes()) weight.form.kind = CodeKind::kInt8;
  return weight;
}

/// Rows for products with weights of one form: rounded to int8, each group of inputs with a step of
/// its own; or as floats, for codes of float8.
///
/// Rows lie in blocks: `block()` bytes of each row side by side, then the next ones of each. Products
/// of several rows reach all of them from one place, at distances that the compiler knows.
class GroupedRows {
 public:
  GroupedRows() = default;
  GroupedRows(int64_t rows, const GroupForm& form) { reserve(rows, form); }

  /// Makes room for `rows` rows of a form. The caller sets them.
  void reserve(int64_t rows, const GroupForm& form) {
    form_ = form;
    rows_ = rows;
    const int64_t row_bytes = form.inputs * form.input_bytes();
    block_ = is_float() ? spaced(row_bytes) : kRowBlock;
    bytes_.reserve((row_bytes + block_ - 1) / block_ * stride());
    if (is_float()) return;
    steps_.reserve(rows * form.groups());
    offsets_.reserve(rows * form.groups());
  }

  /// Bytes of a row that are adjacent: kRowBlock of integers, all of floats.
  int64_t block() const { return block_; }

  /// Bytes from a block of a row to its next one.
  int64_t stride() const { return spaced(rows_ * block_); }

  /// The bytes of row r from a group on: of int8, of pairs of int16, or of floats; up to the block's
  /// end they are adjacent.
  const char* row(int64_t r, int64_t group = 0) const {
    return at(r, group * form_.group * form_.input_bytes());
  }

  /// The value of an integer 1 in each row's group; those of all rows lie side by side.
  const float* steps(int64_t group) const { return steps_.get() + group * rows_; }

  /// Minus the sum of each row's integers of a group, times the form's zero; in the same order.
  const int32_t* offsets(int64_t group) const { return offsets_.get() + group * rows_; }

  const GroupForm& form() const { return form_; }
  int64_t rows() const { return rows_; }

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
    if (is_float()) {
      float* numbers = reinterpret_cast<float*>(at(r, first * form_.input_bytes()));
      std::transform(from, from + count, numbers, [](T x) { return static_cast<float>(x); });
      return;
    }
    for (int64_t i = 0; i < count; i += form_.group) round_group(r, first + i, from + i);
  }

  /// Row r becomes a copy of another's.
  void copy(int64_t r, const GroupedRows& from, int64_t other) const {
    const int64_t bytes = form_.inputs * form_.input_bytes();
    for (int64_t at = 0; at < bytes; at += block_) {
      std::memcpy(this->at(r, at), from.at(other, at), block_);
    }
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

  char* at(int64_t r, int64_t byte) const {
    return bytes_.get() + byte / block_ * stride() + r * block_ + byte % block_;
  }

  /// Rounds the group of row r that begins with input `first`.
  template <class T>
  void round_group(int64_t r, int64_t first, const T* from) const {
    const float largest = largest_magnitude(from, form_.group);
    const float inverse = largest < kTiny ? 0 : kLargestCode / largest;
    Mask<float> totals{};
    const bool as_pairs = kBytesAsPairs && form_.kind == CodeKind::kInt8;
    for_inlined_steps(form_.group, [&](int64_t i, auto count) __attribute__((always_inline)) {
      const Mask<float> integers = round_to_integers(take(from + i, count) * inverse);
      if (as_pairs) {
        put_pairs(r, first + i, integers, count);
      } else {
        put_bytes(r, first + i, integers, count);
      }
      totals += integers;
    });
    const int64_t place = first / form_.group * rows_ + r;
    // A group with an infinity is not a number, as one with NaN is.
    steps_.get()[place] = largest / kLargestCode + (largest - largest);
    offsets_.get()[place] = -form_.zero *
        reduce_integers(totals, [](Mask<float> a, Mask<float> b) { return a + b; });
  }

  /// Writes `count` bytes of row r from `byte` on.
  template <class Bytes, class Count>
  __attribute__((always_inline)) void put(
      int64_t r, int64_t byte, const Bytes& bytes, Count count) const {
    const int64_t here = kRowBlock - byte % kRowBlock;
    if (here >= count) {
      std::memcpy(at(r, byte), &bytes, count);
    } else {
      std::memcpy(at(r, byte), &bytes, here);
      std::memcpy(at(r, byte + here), reinterpret_cast<const char*>(&bytes) + here, count - here);
    }
  }

  /// The first `count` lanes, none of which needs more than a byte, as inputs from `input` on.
  template <class Count>
  void put_bytes(int64_t r, int64_t input, Mask<float> integers, Count count) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i words = words_of(integers);
    put(r, input, _mm_packs_epi16(words, words), count);
#else
    typedef int8_t Bytes __attribute__((vector_size(kStep)));
    put(r, input, __builtin_convertvector(integers, Bytes), count);
#endif
  }

  /// The same as int16, of each four the even ones before the odd ones; `count` is a multiple of
  /// four.
  template <class Count>
  void put_pairs([[maybe_unused]] int64_t r, [[maybe_unused]] int64_t input,
                 [[maybe_unused]] Mask<float> integers, [[maybe_unused]] Count count) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr int kEvenFirst = _MM_SHUFFLE(3, 1, 2, 0);
    constexpr int64_t kPairBytes = sizeof(int16_t);
    const __m128i pairs =
        _mm_shufflehi_epi16(_mm_shufflelo_epi16(words_of(integers), kEvenFirst), kEvenFirst);
    put(r, input * kPairBytes, pairs, count * kPairBytes);
#endif
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  static __m128i words_of(Mask<float> integers) {
    const __m256i all = (__m256i)integers;
    return _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  }
#endif

  GroupForm form_{};
  int64_t rows_ = 0, block_ = kRowBlock;
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
