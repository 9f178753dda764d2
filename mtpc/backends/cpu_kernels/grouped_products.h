// Products of rows with packed codes of 4 or 8 bits, and their sums over groups of inputs.
//
// A group's products are added as integers. That is exact, so the order does not matter. Sums of
// groups are floats, and are added from the first to the last. The same holds for any number of rows
// that share one pass, so a row's bits do not depend on the others.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "grouped_rows.h"

namespace mtpc {

/// a * b + c, rounded once where the level has such an instruction.
inline Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// Registers of a tile's features.
inline constexpr int kTileRegisters = kFeatures / kLanes<float>;

/// Rows that share one pass over a tile.
inline constexpr int kMostGroupedRows = kVectorBytes >= 32 ? 8 : 1;

/// Registers of features that products of integers take at a time. With AVX2, one leaves room for
/// all rows' sums; the broadcast of a row's inputs is a load, of which there are enough.
inline constexpr int kBlock = kVectorBytes == 32 ? 1 : kTileRegisters;

/// The same of products of floats, whose additions wait for one another: several at a time.
template <int kRows>
inline constexpr int kFloatBlock = kRows <= 2 ? kTileRegisters : std::min(2, kTileRegisters);

/// Bytes ahead of the codes in use that are fetched meanwhile.
inline constexpr int64_t kCodesAhead = 4096;

/// Sums of one tile's features, by row.
using GroupedSums = float[kMostGroupedRows][kFeatures];

/// Steps whose products of int4 are added before their sum is widened to 32 bits.
inline constexpr int64_t kNarrowSteps = kBytesAsPairs ? 4 : 0;

/// Eight inputs in 32 bits: the first four in the lower halves of the bytes.
struct Int4Codes {
  static constexpr int kParts = 2;

  template <int kPart>
  static Groups part(Groups codes) {
    return (kPart == 0 ? codes : codes >> 4) & 0x0f0f0f0f;
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  /// In 16 bits, of which 16 products a lane fit in: 16 * 15 * 127 < 2^15.
  static Groups add(Groups sums, Groups codes, Groups x) {
    const __m256i products = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    sums = (Groups)_mm256_add_epi16((__m256i)sums, products);
    __asm__("" : "+x"(sums));  // Added in another order, sums would not stay in registers.
    return sums;
  }

  static Groups widen(Groups sums) {
    return (Groups)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
  }
#else
  static Groups add(Groups sums, Groups codes, Groups x) { return Int8Quads::add(sums, codes, x); }
  static Groups widen(Groups sums) { return sums; }
#endif
};

/// Four inputs in 32 bits.
struct Int8Codes {
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr int kParts = 2;

  /// The even bytes, or the odd ones, as pairs of 16 bits.
  template <int kPart>
  static Groups part(Groups codes) {
    return kPart == 0 ? codes & 0x00ff00ff
                      : (Groups)_mm256_srli_epi16((__m256i)codes, 8);
  }

  static Groups add(Groups sums, Groups codes, Groups x) {
    sums += (Groups)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
    __asm__("" : "+x"(sums));
    return sums;
  }
#else
  static constexpr int kParts = 1;

  template <int>
  static Groups part(Groups codes) {
    return codes;
  }

  static Groups add(Groups sums, Groups codes, Groups x) { return Int8Quads::add(sums, codes, x); }
#endif
  static Groups widen(Groups sums) { return sums; }
};

/// A register of bytes as int32.
inline Groups widen_bytes(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes<float>)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Groups);
}

/// A tile's scales and zero points, a register of features at a time.
class TileScales {
 public:
  explicit TileScales(const GroupedWeight& tile)
      : scales_(tile.scales), zeros_(tile.zeros), type_(tile.scale_type) {}

  Vec<float> scale(int64_t group, int64_t feature) const {
    const int64_t at = group * kFeatures + feature;
    if (type_ == ScalarType::Half) return load<float>(reinterpret_cast<const Half*>(scales_) + at);
    if (type_ == ScalarType::Float) return load<float>(reinterpret_cast<const float*>(scales_) + at);
    return load<float>(reinterpret_cast<const BFloat16*>(scales_) + at);
  }

  bool has_zeros() const { return zeros_ != nullptr; }

  Groups zero(int64_t group, int64_t feature) const {
    return widen_bytes(zeros_ + group * kFeatures + feature);
  }

  void fetch(int64_t group) const {
    constexpr int64_t kAhead = 512;
    const int64_t bytes = type_ == ScalarType::Float ? 4 : 2;
    __builtin_prefetch(scales_ + group * kFeatures * bytes + kAhead, 0, 3);
  }

 private:
  const char* scales_;
  const uint8_t* zeros_;
  ScalarType type_;
};

/// Integer sums of rows' products with kBlock registers of a tile's features.
template <class Codes, int kRows>
class GroupProducts {
 public:
  using Sums = Groups[kRows][kBlock];

  GroupProducts(const GroupedRows& x, int64_t row, const char* codes)
      : x_(reinterpret_cast<const Group*>(x.row(row))),
        stride_(x.stride() / static_cast<int64_t>(sizeof(Group))),
        codes_(codes) {}

  /// Of `count` steps from `step` on, of the registers from `feature` on.
  __attribute__((always_inline)) void sum(
      int64_t step, int64_t count, int feature, Sums& sums) const {
    const int64_t end = step + count;
    if constexpr (std::is_same_v<Codes, Int4Codes> && kNarrowSteps > 0) {
      if (count < kNarrowSteps) return sum_some<false>(step, end, feature, sums);
      sum_few<false>(step, feature, sums);
      for (step += kNarrowSteps; step + kNarrowSteps <= end; step += kNarrowSteps) {
        sum_few<true>(step, feature, sums);
      }
      if (step < end) sum_some<true>(step, end, feature, sums);
    } else {
      sum_some<false>(step, end, feature, sums);
    }
  }

 private:
  template <bool kMore>
  __attribute__((always_inline)) void sum_few(int64_t step, int feature, Sums& sums) const {
    Sums parts{};
    const auto add_all = [&]<int... kStep>(std::integer_sequence<int, kStep...>)
        __attribute__((always_inline)) { (add(step + kStep, feature, parts), ...); };
    add_all(std::make_integer_sequence<int, kNarrowSteps>{});
    widen<kMore>(parts, sums);
  }

  template <bool kMore>
  __attribute__((always_inline)) void sum_some(
      int64_t step, int64_t end, int feature, Sums& sums) const {
    Sums parts{};
    for (; step < end; ++step) add(step, feature, parts);
    widen<kMore>(parts, sums);
  }

  template <bool kMore>
  static __attribute__((always_inline)) void widen(const Sums& parts, Sums& sums) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) {
        const Groups part = Codes::widen(parts[r][i]);
        sums[r][i] = kMore ? sums[r][i] + part : part;
      }
    }
  }

  __attribute__((always_inline)) void add(int64_t step, int feature, Sums& parts) const {
    const char* from = codes_ + step * kGroupBytes + feature * sizeof(Group);
    Groups codes[kBlock];
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) std::memcpy(&codes[i], from + i * kVectorBytes, kVectorBytes);
    add_part<0>(step, codes, parts);
    if constexpr (Codes::kParts == 2) add_part<1>(step, codes, parts);
  }

  template <int kPart>
  __attribute__((always_inline)) void add_part(
      int64_t step, const Groups (&codes)[kBlock], Sums& parts) const {
    Groups these[kBlock];
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) these[i] = Codes::template part<kPart>(codes[i]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Groups x = Groups{} + x_[r * stride_ + Codes::kParts * step + kPart];
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) parts[r][i] = Codes::add(parts[r][i], these[i], x);
    }
  }

  const Group* x_;
  int64_t stride_;
  const char* codes_;
};

/// kRows rows from `row` on times one tile.
template <class Codes, int kRows>
void multiply_codes(const GroupedRows& x, int64_t row, const GroupedWeight& tile,
                    const char* fetch, GroupedSums& out) {
  using Products = GroupProducts<Codes, kRows>;
  constexpr int kRegs = kBlock;
  const TileScales scales(tile);
  const Products products(x, row, tile.codes);
  const int64_t groups = tile.form.groups(), steps = tile.form.steps() / groups;
  const float* x_steps = x.steps(row);
  const int32_t* x_offsets = x.offsets(row);
  Vec<float> totals[kRows][kTileRegisters]{};
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t at = 0; at < steps * kGroupBytes; at += 64) {
      __builtin_prefetch(fetch + at, 0, 3);
    }
    fetch += steps * kGroupBytes;
    scales.fetch(g);
#pragma GCC unroll 4
    for (int first = 0; first < kTileRegisters; first += kRegs) {
      typename Products::Sums sums;
      products.sum(g * steps, steps, first * kLanes<float>, sums);
#pragma GCC unroll 8
      for (int i = 0; i < kRegs; ++i) {
        const int feature = (first + i) * kLanes<float>;
        const Vec<float> scale = scales.scale(g, feature);
        const Groups zero = scales.has_zeros() ? scales.zero(g, feature) : Groups{} + 1;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Groups offset = zero * x_offsets[r * groups + g];
          const Vec<float> sum = __builtin_convertvector(sums[r][i] - offset, Vec<float>);
          Vec<float>& total = totals[r][first + i];
          total = multiply_add(sum, scale * x_steps[r * groups + g], total);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(out[r], totals[r], sizeof(out[r]));
}

/// Byte kByte of each lane, a float8, times 2^-120.
template <int kByte>
inline Vec<float> small_float8(Groups codes) {
  return reinterpret_cast<Vec<float>>(((codes << (24 - 8 * kByte)) >> 4) & 0x87f00000);
}

/// Bytes that are a float8's NaN have their sign set.
inline Groups find_nan(Groups codes) { return (codes & 0x7f7f7f7f) + 0x01010101; }

/// The same, of codes that are float8 and rows that are floats.
template <int kRows>
void multiply_float8(const GroupedRows& x, int64_t row, const GroupedWeight& tile,
                     const char* fetch, GroupedSums& out) {
  constexpr int kRegs = kFloatBlock<kRows>;
  const TileScales scales(tile);
  const int64_t groups = tile.form.groups(), steps = tile.form.steps() / groups;
  const float* numbers = reinterpret_cast<const float*>(x.row(row));
  const int64_t stride = x.stride() / static_cast<int64_t>(sizeof(float));
  Vec<float> totals[kRows][kTileRegisters]{};
  Groups nan[kTileRegisters]{};
  for (int64_t g = 0; g < groups; ++g) {
    scales.fetch(g);
#pragma GCC unroll 4
    for (int first = 0; first < kTileRegisters; first += kRegs) {
      Vec<float> sums[kRows][kRegs]{};
      for (int64_t k = g * steps; k < (g + 1) * steps; ++k) {
        const char* from = tile.codes + k * kGroupBytes + first * kVectorBytes;
        if (first == 0) {
          __builtin_prefetch(fetch + k * kGroupBytes, 0, 3);
          __builtin_prefetch(fetch + k * kGroupBytes + 64, 0, 3);
        }
        Groups codes[kRegs];
#pragma GCC unroll 8
        for (int i = 0; i < kRegs; ++i) {
          std::memcpy(&codes[i], from + i * kVectorBytes, kVectorBytes);
          nan[first + i] |= find_nan(codes[i]);
        }
        const auto add = [&](auto byte) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int i = 0; i < kRegs; ++i) {
            const Vec<float> weight = small_float8<byte>(codes[i]) * 0x1p120f;
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              const Vec<float> input = Vec<float>{} + numbers[r * stride + 4 * k + byte];
              sums[r][i] = multiply_add(weight, input, sums[r][i]);
            }
          }
        };
        add(std::integral_constant<int, 0>{});
        add(std::integral_constant<int, 1>{});
        add(std::integral_constant<int, 2>{});
        add(std::integral_constant<int, 3>{});
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRegs; ++i) {
        const Vec<float> scale = scales.scale(g, (first + i) * kLanes<float>);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          totals[r][first + i] = multiply_add(sums[r][i], scale, totals[r][first + i]);
        }
      }
    }
  }
  const Vec<float> not_a_number = Vec<float>{} + std::numeric_limits<float>::quiet_NaN();
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kTileRegisters; ++i) {
      store(out[r] + i * kLanes<float>, (nan[i] & 0x80808080) == 0 ? totals[r][i] : not_a_number);
    }
  }
}

using MultiplyGrouped = void (*)(const GroupedRows&, int64_t, const GroupedWeight&, const char*,
                                 GroupedSums&);

/// By the kind of codes, and the number of rows less one.
template <int... kRows>
constexpr std::array<std::array<MultiplyGrouped, sizeof...(kRows)>, 3> grouped_table(
    std::integer_sequence<int, kRows...>) {
  return {{{multiply_codes<Int4Codes, kRows + 1>...},
           {multiply_codes<Int8Codes, kRows + 1>...},
           {multiply_float8<kRows + 1>...}}};
}

/// `rows` rows from `first` on times one tile; body(row, its 32 sums), row from 0 on, for each.
template <class Body>
void for_grouped_products(const GroupedRows& x, int64_t first, int64_t rows,
                          const GroupedWeight& tile, const Body& body) {
  static constexpr auto kMultiply =
      grouped_table(std::make_integer_sequence<int, kMostGroupedRows>{});
  const auto& multiply = kMultiply[static_cast<int>(tile.form.kind)];
  const int64_t passes = (rows + kMostGroupedRows - 1) / kMostGroupedRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = pass * rows / passes, count = (pass + 1) * rows / passes - row;
    GroupedSums sums;
    multiply[count - 1](x, first + row, tile, tile.codes + kCodesAhead, sums);
    for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
  }
}

}  // namespace mtpc
