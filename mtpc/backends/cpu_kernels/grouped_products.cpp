// Products of rows with packed codes of 4 or 8 bits: of each kind of codes, for each number of rows.
//
// A group's products are added as integers. That is exact, so the order does not matter. Sums of
// groups are floats, and are added from the first to the last. The same holds for any number of rows
// that share one pass, so a row's bits do not depend on the others.
#include "grouped_products.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "code_tables.h"
#include "grouped_scales.h"

namespace mtpc {
namespace {

/// Registers of a tile's features.
constexpr int kTileRegisters = kFeatures / kLanes<float>;

/// Registers of features that products of integers take at a time. With AVX2, few enough that the
/// sums of all rows stay in registers.
template <int kRows>
constexpr int kBlock = kVectorBytes == 32 ? (kRows <= 4 ? 2 : 1) : kTileRegisters;

/// Steps of a tile that each block of registers takes before the next block takes them again, from
/// the first-level cache.
constexpr int64_t kWindow = 16;

/// The same for products of floats. Their additions wait for one another, so it takes several.
template <int kRows>
constexpr int kFloatBlock = kRows <= 2 ? kTileRegisters : std::min(2, kTileRegisters);

/// Steps that are gone through at a time. With int4, where sums need widening to 32 bits, the products
/// of so many steps are added first.
constexpr int64_t kFewSteps = 4;

#if !defined(__AVX2__) || defined(__AVX512F__)
/// sums + the products of a's four bytes, without a sign, with b's four int8, lane by lane. Sums are
/// exact up to 65,000 inputs.
inline Groups add_quads(Groups sums, Groups a, Groups b) {
#if defined(__AVX512VNNI__)
  return (Groups)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
  for (int i = 0; i < 4; ++i) sums += (a >> 8 * i & 0xff) * (b << (24 - 8 * i) >> 24);
  return sums;
#endif
}
#endif

/// Eight inputs in 32 bits: the first four in the lower halves of the bytes.
struct Int4Codes {
  static constexpr int kParts = 2;

  /// Whether sums of kFewSteps are widened before they are added to others.
  static constexpr bool kIsNarrow = kBytesAsPairs;

  template <int kPart>
  static Groups part(Groups codes) {
    return (kPart == 0 ? codes : codes >> 4) & 0x0f0f0f0f;
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  /// In 16 bits, which hold 16 products a lane: 16 * 15 * 127 < 2^15.
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
  static Groups add(Groups sums, Groups codes, Groups x) { return add_quads(sums, codes, x); }
#endif
};

/// Four inputs in 32 bits.
struct Int8Codes {
  static constexpr bool kIsNarrow = false;

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

  static Groups add(Groups sums, Groups codes, Groups x) { return add_quads(sums, codes, x); }
#endif
};

/// Eight inputs in 32 bits, which are places in a table.
template <const Table& kTable>
struct CodesOfTable {
  static constexpr int kParts = 2;
  static constexpr bool kIsNarrow = false;

  template <int kPart>
  static Groups part(Groups codes) {
    return look_up(Int4Codes::part<kPart>(codes), kTable);
  }

  static Groups add(Groups sums, Groups codes, Groups x) { return Int4Codes::add(sums, codes, x); }
};

/// Integer sums of rows' products with kBlock registers of a tile's features.
template <class Codes, int kRows>
class GroupProducts {
  using Ahead = LineAhead<kRows>;

 public:
  static constexpr int kRegs = kBlock<kRows>;
  using Sums = Groups[kRows][kRegs];

  GroupProducts(const GroupedRows& x, int64_t row, const GroupedWeight& tile)
      : x_(reinterpret_cast<const Group*>(x.row(row, tile.first))),
        stride_(x.stride() / static_cast<int64_t>(sizeof(Group))),
        codes_(tile.codes),
        ahead_(tile.ahead ? tile.ahead : tile.codes + Ahead::kCodes),
        ahead_step_(tile.ahead_bits * kGroupBytes / 8) {}

  /// Adds those of `count` steps from `step` on, of the registers from `feature` on, to `sums`. A
  /// constant count divides a block's steps, and the steps before.
  template <class Count>
  __attribute__((always_inline)) void add(
      int64_t step, Count count, int feature, Sums& sums) const {
    if constexpr (!std::is_same_v<Count, int64_t>) {
      Part(*this, step, feature).add_few(std::make_integer_sequence<int, Count::value>{}, sums);
    } else {
      for (const int64_t end = step + count; step < end;) {
        int64_t left = std::min(end - step, kBlockSteps - step % kBlockSteps);
        Part part(*this, step, feature);
        step += left;
        for (; left >= kFewSteps; left -= kFewSteps) {
          part.add_few(std::make_integer_sequence<int, kFewSteps>{}, sums);
        }
        for (; left > 0; --left) part.add_few(std::integer_sequence<int, 0>{}, sums);
      }
    }
  }

 private:
  /// Groups of 32 bits of a row's block, and the steps that take them.
  static constexpr int64_t kBlockGroups = kRowBlock / sizeof(Group);
  static constexpr int64_t kBlockSteps = kBlockGroups / Codes::kParts;

  /// Where products have got to, in a block of the rows and in the codes.
  class Part {
   public:
    __attribute__((always_inline)) Part(const GroupProducts& all, int64_t step, int feature)
        : codes_(all.codes_ + step * kGroupBytes + feature * sizeof(Group)),
          ahead_(all.ahead_ + step * all.ahead_step_ + feature * sizeof(Group)),
          ahead_step_(all.ahead_step_),
          rows_(all.x_ + step / kBlockSteps * all.stride_ + Codes::kParts * (step % kBlockSteps)) {}

    /// Adds the products of so many steps, and goes on behind them.
    template <int... kStep>
    __attribute__((always_inline)) void add_few(std::integer_sequence<int, kStep...>, Sums& sums) {
      if constexpr (Codes::kIsNarrow) {
        Sums parts{};
        (add(kStep, parts), ...);
        widen(parts, sums);
      } else {
        (add(kStep, sums), ...);
      }
      codes_ += sizeof...(kStep) * kGroupBytes;
      ahead_ += sizeof...(kStep) * ahead_step_;
      rows_ += Codes::kParts * sizeof...(kStep);
    }

   private:
    __attribute__((always_inline)) void add(int step, Sums& sums) const {
      const char* from = codes_ + step * kGroupBytes;
      Groups codes[kRegs];
#pragma GCC unroll 12
      for (int i = 0; i < kRegs; ++i) {
        std::memcpy(&codes[i], from + i * kVectorBytes, kVectorBytes);
        if (i * kVectorBytes % kLine) continue;
        Ahead::fetch(ahead_ + step * ahead_step_ + i * kVectorBytes);
      }
      add_part<0>(step, codes, sums);
      if constexpr (Codes::kParts == 2) add_part<1>(step, codes, sums);
    }

    template <int kPart>
    __attribute__((always_inline)) void add_part(
        int step, const Groups (&codes)[kRegs], Sums& sums) const {
      Groups these[kRegs];
#pragma GCC unroll 12
      for (int i = 0; i < kRegs; ++i) these[i] = Codes::template part<kPart>(codes[i]);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Groups x = Groups{} + rows_[r * kBlockGroups + Codes::kParts * step + kPart];
#pragma GCC unroll 12
        for (int i = 0; i < kRegs; ++i) sums[r][i] = Codes::add(sums[r][i], these[i], x);
      }
    }

    static __attribute__((always_inline)) void widen(const Sums& parts, Sums& sums) {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < kRegs; ++i) sums[r][i] += Codes::widen(parts[r][i]);
      }
    }

    const char *codes_, *ahead_;
    int64_t ahead_step_;
    const Group* rows_;
  };

  const Group* x_;
  int64_t stride_;
  const char *codes_, *ahead_;
  int64_t ahead_step_;
};

/// kRows rows from `row` on times one tile.
template <class Codes, int kRows>
class TileProduct {
  using Products = GroupProducts<Codes, kRows>;
  using Sums = typename Products::Sums;
  static constexpr int kRegs = Products::kRegs, kBlocks = kTileRegisters / kRegs;
  using Totals = Vec<float>[kRows][kRegs];

 public:
  TileProduct(const GroupedRows& x, int64_t row, const GroupedWeight& tile)
      : products_(x, row, tile),
        scales_(tile),
        x_steps_(x.steps(tile.first) + row),
        x_offsets_(x.offsets(tile.first) + row),
        x_rows_(x.rows()),
        goes_on_(tile.first > 0),
        groups_(tile.form.groups()),
        steps_(tile.form.steps() / groups_) {}

  __attribute__((always_inline)) void operator()(GroupedSums out) const {
    Totals totals[kBlocks]{};
    if (goes_on_) {
      for (int r = 0; r < kRows; ++r) {
        for (int b = 0; b < kBlocks; ++b) std::memcpy(totals[b][r], out[r] + feature(b), kBytes);
      }
    }
    // Groups of 16 or 32 inputs are the common ones.
    using Few = std::integral_constant<int64_t, kFewSteps>;
    using Many = std::integral_constant<int64_t, 2 * kFewSteps>;
    if (steps_ == Few::value) {
      add_groups(Few{}, totals);
    } else if (std::is_same_v<Codes, Int8Codes> && steps_ == Many::value) {
      add_groups(Many{}, totals);
    } else if (steps_ <= kWindow) {
      add_groups(steps_, totals);
    } else {
      for (int64_t g = 0; g < groups_; ++g) add_large_group(g, totals);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kBlocks; ++b) std::memcpy(out[r] + feature(b), totals[b][r], kBytes);
    }
  }

 private:
  static constexpr int kBytes = kRegs * kVectorBytes;

  static int feature(int block) { return block * kRegs * kLanes<float>; }

  /// All groups, of `steps` each: a window of them for one block after the other.
  template <class Steps>
  __attribute__((always_inline)) void add_groups(
      Steps steps, Totals (&totals)[kBlocks]) const {
    const int64_t span = kWindow / std::max<int64_t>(steps, 1);
    for (int64_t first = 0; first < groups_; first += span) {
      const int64_t end = std::min(first + span, groups_);
      scales_.fetch<kRows>(first, end);
      for (int b = 0; b < kBlocks; ++b) {
        for (int64_t g = first; g < end; ++g) {
          Sums sums;
          begin(g, b, sums);
          products_.add(g * steps, steps, feature(b), sums);
          finish(g, b, sums, totals[b]);
        }
      }
    }
  }

  /// A group that is gone through in parts, all blocks in each.
  __attribute__((always_inline)) void add_large_group(
      int64_t g, Totals (&totals)[kBlocks]) const {
    Sums sums[kBlocks];
    for (int b = 0; b < kBlocks; ++b) begin(g, b, sums[b]);
    for (int64_t step = 0; step < steps_; step += kWindow) {
      const int64_t count = std::min(kWindow, steps_ - step), at = g * steps_ + step;
      for (int b = 0; b < kBlocks; ++b) products_.add(at, count, feature(b), sums[b]);
    }
    scales_.fetch<kRows>(g, g + 1);
    for (int b = 0; b < kBlocks; ++b) finish(g, b, sums[b], totals[b]);
  }

  /// Begins a group's sums with the contribution of zero points; products are added to it.
  __attribute__((always_inline)) void begin(int64_t g, int block, Sums& sums) const {
    const int32_t* x_offsets = x_offsets_ + g * x_rows_;
#pragma GCC unroll 12
    for (int i = 0; i < kRegs; ++i) {
      if (scales_.has_zeros()) {
        const Groups zero = scales_.zero(g, feature(block) + i * kLanes<float>);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sums[r][i] = zero * x_offsets[r];
      } else if (scales_.has_mins()) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sums[r][i] = Groups{};
      } else {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sums[r][i] = Groups{} + x_offsets[r];
      }
    }
  }

  /// Adds the sums of a group's integers, scaled, to the totals, and takes minima away.
  __attribute__((always_inline)) void finish(
      int64_t g, int block, const Sums& sums, Totals& totals) const {
    const float* x_steps = x_steps_ + g * x_rows_;
#pragma GCC unroll 12
    for (int i = 0; i < kRegs; ++i) {
      const Vec<float> scale = scales_.scale(g, feature(block) + i * kLanes<float>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Vec<float> sum = __builtin_convertvector(sums[r][i], Vec<float>);
        totals[r][i] = multiply_add(sum, scale * x_steps[r], totals[r][i]);
      }
      if (!scales_.has_mins()) continue;
      const int32_t* x_offsets = x_offsets_ + g * x_rows_;
      const Vec<float> min = scales_.min(g, feature(block) + i * kLanes<float>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Vec<float> offset = Vec<float>{} + static_cast<float>(x_offsets[r]);
        totals[r][i] = multiply_add(offset, min * x_steps[r], totals[r][i]);
      }
    }
  }

  Products products_;
  TileScales scales_;
  const float* x_steps_;
  const int32_t* x_offsets_;
  int64_t x_rows_;
  bool goes_on_;
  int64_t groups_, steps_;
};

template <class Codes, int kRows>
void multiply_codes(const GroupedRows& x, int64_t row, const GroupedWeight& tile,
                    GroupedSums out) {
  TileProduct<Codes, kRows>(x, row, tile)(out);
}

/// Bytes that are a float8's NaN have their sign set.
inline Groups find_nan(Groups codes) { return (codes & 0x7f7f7f7f) + 0x01010101; }

/// The same, of codes that are float8 and rows that are floats.
template <int kRows>
void multiply_float8(const GroupedRows& x, int64_t row, const GroupedWeight& tile,
                     GroupedSums out) {
  constexpr int kRegs = kFloatBlock<kRows>;
  using Ahead = LineAhead<kRows>;
  const TileScales scales(tile);
  const int64_t groups = tile.form.groups(), steps = tile.form.steps() / groups;
  const float* numbers = reinterpret_cast<const float*>(x.row(row));
  const int64_t stride = x.block() / static_cast<int64_t>(sizeof(float));
  Vec<float> totals[kRows][kTileRegisters]{};
  Groups nan[kTileRegisters]{};
  for (int64_t g = 0; g < groups; ++g) {
    scales.fetch<kRows>(g, g + 1);
#pragma GCC unroll 4
    for (int first = 0; first < kTileRegisters; first += kRegs) {
      Vec<float> sums[kRows][kRegs]{};
      for (int64_t k = g * steps; k < (g + 1) * steps; ++k) {
        const char* from = tile.codes + k * kGroupBytes + first * kVectorBytes;
        if (first == 0) {
          Ahead::fetch(from + Ahead::kCodes);
          Ahead::fetch(from + Ahead::kCodes + kLine);
        }
        Groups codes[kRegs];
#pragma GCC unroll 12
        for (int i = 0; i < kRegs; ++i) {
          std::memcpy(&codes[i], from + i * kVectorBytes, kVectorBytes);
          nan[first + i] |= find_nan(codes[i]);
        }
        const auto add = [&](auto byte) __attribute__((always_inline)) {
#pragma GCC unroll 12
          for (int i = 0; i < kRegs; ++i) {
            const Vec<float> weight = small_float8<byte>(codes[i]) * 0x1p120f;
#pragma GCC unroll 12
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
#pragma GCC unroll 12
      for (int i = 0; i < kRegs; ++i) {
        const Vec<float> scale = scales.scale(g, (first + i) * kLanes<float>);
#pragma GCC unroll 12
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

template <int... kRows>
constexpr std::array<MultiplyRows, 5> all_products(std::integer_sequence<int, kRows...>) {
  constexpr int kMost = kMostGroupedRows;
  using Iq4 = std::conditional_t<kLooksUp, CodesOfTable<kIq4Table>, Int8Codes>;
  using E2m1 = std::conditional_t<kLooksUp, CodesOfTable<kE2m1Table>, Int8Codes>;
  return {{{multiply_codes<Int4Codes, std::min(kRows + 1, kMost)>...},
           {multiply_codes<Int8Codes, kRows + 1>...},
           {multiply_float8<std::min(kRows + 1, kMost)>...},
           {multiply_codes<Iq4, std::min(kRows + 1, kMost)>...},
           {multiply_codes<E2m1, std::min(kRows + 1, kMost)>...}}};
}

}  // namespace

constexpr std::array<MultiplyRows, 5> kMultiplyGrouped =
    all_products(std::make_integer_sequence<int, kMostWholeRows>{});

}  // namespace mtpc
