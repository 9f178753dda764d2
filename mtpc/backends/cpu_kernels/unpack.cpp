// See unpack.h. A lane is a feature: all that belongs to a feature lies in its 32 bits of each step.
#include "unpack.h"

#include <utility>

#include "code_tables.h"
#include "grouped_scales.h"

namespace mtpc {
namespace {

constexpr int kTileRegisters = kFeatures / kLanes<float>;

inline Groups load_groups(const char* from) {
  Groups out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

/// The four bits of four inputs, of the words that hold those of eight.
template <int kQuad>
inline Groups low_bits(const char* words) {
  const Groups both = load_groups(words + kQuad / 2 * kGroupBytes);
  return (kQuad % 2 ? both >> 4 : both) & 0x0f0f0f0f;
}

/// How codes of a kind become bytes: kWords groups of 32 bits hold kQuads times four inputs.
template <StoredCodes>
struct Unit;

template <>
struct Unit<StoredCodes::kInt8> {
  static constexpr int kWords = 1, kQuads = 1;

  template <int>
  static Groups quad(const char* words) {
    return load_groups(words);
  }
};

template <>
struct Unit<StoredCodes::kInt4> {
  static constexpr int kWords = 1, kQuads = 2;

  template <int kQuad>
  static Groups quad(const char* words) {
    return low_bits<kQuad>(words);
  }
};

/// The last word has kBits more for each input; those of four lie in its four bytes.
template <int kBits, int kAll>
struct UnitOfMore {
  static constexpr int kQuads = kAll, kWords = kQuads / 2 + 1;

  template <int kQuad>
  static Groups quad(const char* words) {
    constexpr int kShift = 4 - kBits * kQuad, kMask = 0x10101010 * ((1 << kBits) - 1);
    const Groups rest = load_groups(words + kQuads / 2 * kGroupBytes);
    const Groups above = kShift > 0 ? rest << std::max(kShift, 0) : rest >> std::max(-kShift, 0);
    return low_bits<kQuad>(words) | (above & kMask);
  }
};

template <>
struct Unit<StoredCodes::kInt5> : UnitOfMore<1, 8> {};

template <>
struct Unit<StoredCodes::kInt6> : UnitOfMore<2, 4> {};

template <const Table& kTable>
struct UnitOfTable {
  static constexpr int kWords = 1, kQuads = 2;

  template <int kQuad>
  static Groups quad(const char* words) {
    return look_up(low_bits<kQuad>(words), kTable);
  }
};

template <>
struct Unit<StoredCodes::kIq4> : UnitOfTable<kIq4Table> {};

template <>
struct Unit<StoredCodes::kE2m1> : UnitOfTable<kE2m1Table> {};

/// Some inputs' codes as bytes.
template <StoredCodes kStored>
void unpack_codes(const char* from, int64_t inputs, char* to) {
  using U = Unit<kStored>;
  const auto put = [&]<int... kQuad>(std::integer_sequence<int, kQuad...>, int64_t at)
                       __attribute__((always_inline)) {
    const auto put_quad = [&](int quad, Groups bytes) __attribute__((always_inline)) {
      std::memcpy(to + quad * kGroupBytes + at, &bytes, sizeof(bytes));
    };
    (put_quad(kQuad, U::template quad<kQuad>(from + at)), ...);
  };
  for (int64_t k = 0; k < inputs; k += 4 * U::kQuads) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i) {
      put(std::make_integer_sequence<int, U::kQuads>{}, i * kVectorBytes);
    }
    from += U::kWords * kGroupBytes;
    to += U::kQuads * kGroupBytes;
  }
}

using UnpackCodes = void (*)(const char*, int64_t, char*);
constexpr UnpackCodes kUnpackCodes[] = {
    unpack_codes<StoredCodes::kInt4>, unpack_codes<StoredCodes::kInt5>,
    unpack_codes<StoredCodes::kInt6>, unpack_codes<StoredCodes::kInt8>,
    unpack_codes<StoredCodes::kIq4>,  unpack_codes<StoredCodes::kE2m1>};

inline Vec<float> as_floats(Groups integers) { return __builtin_convertvector(integers, Vec<float>); }

/// Words of a super-block's scales, 16 bits of each feature, of the features from `feature` on.
class SuperWords {
 public:
  SuperWords(const char* from, int feature) : words_(reinterpret_cast<const Half*>(from) + feature) {}

  Vec<float> step(int word) const { return widen(words_ + word * kFeatures); }

  /// kBits of the word from bit `shift` on.
  template <int kBits>
  Groups bits(int word, int shift) const {
    return pairs(word) >> shift & ((1 << kBits) - 1);
  }

  /// A byte of the words from `word` on, with a sign.
  Groups byte(int word, int byte) const {
    return pairs(word + byte / 2) << (24 - 8 * (byte % 2)) >> 24;
  }

 private:
  Groups pairs(int word) const {
    typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
    Narrow narrow;
    std::memcpy(&narrow, words_ + word * kFeatures, sizeof(narrow));
    return __builtin_convertvector(narrow, Groups);
  }

  const Half* words_;
};

/// The 6 bits that byte kPart of two runs of four bytes has for each of eight groups: those of the
/// first four in the first run; of the others 4 bits in the last run, and the upper 2 above the first.
inline Groups six_bits(const SuperWords& words, int first, int last, int shift, int group) {
  const int byte = group % 4, place = 8 * (byte % 2);
  if (group < 4) return words.bits<6>(first + byte / 2, place);
  return words.bits<4>(last + byte / 2, place + shift) |
      words.bits<2>(first + byte / 2, place + 6) << 4;
}

/// One super-block's scales, and minima.
void expand(const char* from, const GroupForm& form, bool has_mins, float* scales, float* mins) {
  for (int feature = 0; feature < kFeatures; feature += kLanes<float>) {
    const SuperWords words(from, feature);
    const Vec<float> step = words.step(0);
    const auto put = [&](float* to, int group, Vec<float> value) {
      store(to + group * kFeatures + feature, value);
    };
    if (has_mins) {
      const Vec<float> least = words.step(1);
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        put(scales, g, step * as_floats(six_bits(words, 2, 6, 0, g)));
        put(mins, g, least * as_floats(six_bits(words, 4, 6, 4, g)));
      }
    } else if (form.group == kSuper / 16) {
#pragma GCC unroll 16
      for (int g = 0; g < 16; ++g) put(scales, g, step * as_floats(words.byte(1, g)));
    } else {
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        const Groups low = words.bits<4>(2 + g / 4, 4 * (g % 4)), high = words.bits<2>(1, 2 * g);
        put(scales, g, step * as_floats((low | high << 4) - 32));
      }
    }
  }
}

/// 2^(e - 128) of exponents; NaN for 255.
void raise(const char* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const Groups e = widen_bytes(reinterpret_cast<const uint8_t*>(from) + i);
    // The two lowest are subnormal: half and a quarter of the least normal number.
    const Groups bits = e < 2 ? (Groups{} + 0x200000) << e : (e - 1) << 23;
    store(to + i, reinterpret_cast<Vec<float>>(e == 255 ? Groups{} + 0x7fc00000 : bits));
  }
}

/// float8 times the float64 of each feature, whose bytes are the first rows; rounded once.
void multiply_levels(const char* rows, const char* from, int64_t groups, float* to) {
  uint64_t bits[kFeatures]{};
  for (int64_t b = 0; b < kRowBytes; ++b, rows += kFeatures) {
    for (int f = 0; f < kFeatures; ++f) {
      bits[f] |= static_cast<uint64_t>(static_cast<uint8_t>(rows[f])) << 8 * b;
    }
  }
  double of_row[kFeatures];
  std::memcpy(of_row, bits, sizeof(of_row));
  for (int64_t g = 0; g < groups; ++g, from += kFeatures, to += kFeatures) {
    for (int f = 0; f < kFeatures; f += kLanes<float>) {
      const Groups codes = widen_bytes(reinterpret_cast<const uint8_t*>(from) + f);
      store(to + f, small_float8<0>(codes) * 0x1p120f);
    }
    for (int f = 0; f < kFeatures; ++f) to[f] = static_cast<float>(to[f] * of_row[f]);
  }
}

}  // namespace

GroupedWeight UnpackedPart::take(const GroupedWeight& tile, int64_t first, bool as_bytes) {
  GroupedWeight part = tile;
  part.form.inputs = std::min(kUnpacked, tile.form.inputs - first);
  part.first = first / tile.form.group;
  part.codes += first * tile.bits * kFeatures / 8;
  if (as_bytes || !tile.keeps_codes()) {
    kUnpackCodes[static_cast<int>(tile.stored)](part.codes, part.form.inputs, codes_);
    // Fetched meanwhile, so that memory is busy while products are.
    part.ahead = part.codes + kCodesAhead;
    part.ahead_bits = tile.bits;
    part.codes = codes_;
    part.stored = StoredCodes::kInt8;
    part.bits = 8;
    part.form.kind = CodeKind::kInt8;
  }
  if (tile.zeros) part.zeros = tile.zeros + part.first * kFeatures * tile.zero_bytes();
  if (tile.scale_type == ScalarType::Short) {
    const int64_t block = tile.scale_rows * kSuper / tile.form.inputs * kFeatures * sizeof(Half);
    const int64_t groups = kSuper / tile.form.group * kFeatures;
    for (int64_t b = 0; b < part.form.inputs / kSuper; ++b) {
      expand(tile.scales + (first / kSuper + b) * block, tile.form, tile.has_mins,
             scales_ + b * groups, mins_ + b * groups);
    }
    if (tile.has_mins) part.zeros = reinterpret_cast<const char*>(mins_);
  } else if (tile.scale_type == ScalarType::Byte) {
    raise(tile.scales + part.first * kFeatures, part.form.groups() * kFeatures, scales_);
  } else if (tile.scale_type == ScalarType::Char) {
    const char* scales = tile.scales + (kRowBytes + part.first) * kFeatures;
    multiply_levels(tile.scales, scales, part.form.groups(), scales_);
  } else {
    part.scales = tile.scales + part.first * kFeatures * tile.scale_bytes();
    return part;
  }
  part.scales = reinterpret_cast<const char*>(scales_);
  part.scale_type = ScalarType::Float;
  return part;
}

}  // namespace mtpc
