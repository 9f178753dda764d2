// See grouped_tiles.h.
#include "grouped_tiles.h"

#if defined(__AMX_TILE__)
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "grouped_scales.h"

namespace mtpc {
namespace {

/// Up to 32 rows from `row` on times one tile; kBoth of more than 16. A step takes kQuads groups of
/// 32 bits of a row. Codes of 4 bits that are kSigned have the zero point 8 taken away before they
/// are multiplied.
///
/// A read of what was just written waits until the write has reached the cache. So codes become bytes
/// some steps before their use, and a few groups' sums are scaled while the next ones are computed.
template <bool kInt4, bool kSigned, bool kBoth, int kQuads>
class RegisterProduct {
 public:
  RegisterProduct(const GroupedRows& x, int64_t row, int64_t rows, const GroupedWeight& tile)
      : x_(x.row(row, tile.first)),
        stride_(x.stride()),
        rows_(rows),
        goes_on_(tile.first > 0),
        codes_(tile.codes),
        ahead_(tile.ahead ? tile.ahead : tile.codes + kCodesAhead),
        ahead_step_(tile.ahead_bits * kGroupBytes / 8),
        scales_(tile),
        x_steps_(x.steps(tile.first) + row),
        x_offsets_(x.offsets(tile.first) + row),
        x_rows_(x.rows()),
        groups_(tile.form.groups()),
        steps_(tile.form.inputs / (kQuad * kQuads)) {}

  /// The registers are configured for these rows and quads.
  void operator()(float (*totals)[kFeatures]) {
    if (!goes_on_) std::memset(totals, 0, rows_ * sizeof(*totals));
    for (int64_t step = 0; step < kFew; ++step) prepare(step);
    const bool is_short = groups_ == steps_;
    const int64_t span = is_short ? kFew : 1;
    int64_t turn = 0;
    for (int64_t first = 0; first < groups_; first += span, turn ^= 1) {
      if (!is_short) {
        add_long(first, sums_[turn][0]);
      } else if (first + kFew <= groups_) {
        add_short(first, std::make_integer_sequence<int, kFew>{}, sums_[turn]);
      } else {
        for (int64_t g = first; g < groups_; ++g) {
          add_short(g, std::integer_sequence<int, 0>{}, sums_[turn] + (g - first));
        }
      }
      if (first > 0) finish(first - span, span, sums_[turn ^ 1], totals);
    }
    const int64_t last = (groups_ - 1) / span * span;
    finish(last, groups_ - last, sums_[turn ^ 1], totals);
  }

 private:
  static constexpr int64_t kQuad = 4, kFew = kBoth ? 2 : 4, kRows = kBoth ? kMostRows : kTileRows;

  /// A step's codes as bytes, and a group's sums. A line lies between one and the next, so that
  /// they are not at the same places of the first-level cache.
  using Bytes = Group[kQuads][kFeatures];
  using Sums = int32_t[kRows * kFeatures + kTileRows];

  /// Groups of one step. Two pairs of registers take turns, and what one has is stored after the
  /// other's next products: those wait for the first half of the rows, or the group before.
  template <int... kGroup>
  __attribute__((always_inline)) void add_short(
      int64_t first, std::integer_sequence<int, kGroup...>, Sums* sums) {
    (add_group<kGroup>(first + kGroup, sums), ...);
    constexpr int kLast = sizeof...(kGroup) - 1;
    if constexpr (kBoth) {
      store_pair<1>(sums[kLast] + kTileRows * kFeatures);
    } else {
      store_pair<kLast % 2>(sums[kLast]);
    }
    settle_memory();
  }

  template <int kGroup>
  __attribute__((always_inline)) void add_group(int64_t g, Sums* sums) {
    prepare(g + kFew);
    settle_memory();
    const char* x = row_of(g);
    constexpr int kPair = kBoth ? 0 : kGroup % 2;
    zero_pair<kPair>();
    multiply<kPair>(x, codes_of(g));
    if constexpr (kGroup > 0 && kBoth) store_pair<1>(sums[kGroup - 1] + kTileRows * kFeatures);
    if constexpr (kGroup > 0 && !kBoth) store_pair<1 - kPair>(sums[kGroup - 1]);
    if constexpr (kBoth) {
      zero_pair<1>();
      multiply_others(x);
      store_pair<0>(sums[kGroup]);
    }
  }

  /// A group of several steps.
  void add_long(int64_t g, Sums& sums) {
    const int64_t steps = steps_ / groups_;
    zero_pair<0>();
    if constexpr (kBoth) zero_pair<1>();
    for (int64_t step = g * steps; step < (g + 1) * steps; ++step) {
      prepare(step + kFew);
      settle_memory();
      const char* x = row_of(step);
      multiply<0>(x, codes_of(step));
      if constexpr (kBoth) multiply_others(x);
    }
    store_pair<0>(sums);
    if constexpr (kBoth) store_pair<1>(sums + kTileRows * kFeatures);
    settle_memory();
  }

  /// The first row's inputs of a step.
  const char* row_of(int64_t step) const {
    constexpr int64_t kBytes = kQuads * kQuad, kSteps = kRowBlock / kBytes;
    return x_ + step / kSteps * stride_ + step % kSteps * kBytes;
  }

  /// A step's codes as bytes.
  const Group* codes_of(int64_t step) const {
    if constexpr (kInt4) return bytes_[step % (2 * kFew)][0];
    return reinterpret_cast<const Group*>(codes_ + step * kQuads * kGroupBytes);
  }

  /// Makes a step's codes bytes, or fetches them, if there is such a step.
  __attribute__((always_inline)) void prepare(int64_t step) {
    if (step >= steps_) return;
    if constexpr (kInt4) {
      Bytes& to = bytes_[step % (2 * kFew)];
      const char* from = codes_ + step * kQuads / 2 * kGroupBytes;
#pragma GCC unroll 4
      for (int pair = 0; pair < kQuads / 2; ++pair) {
        write_pair(from + pair * kGroupBytes, to[2 * pair]);
      }
    } else {
      const char* from = ahead_ + step * kQuads * ahead_step_;
#pragma GCC unroll 8
      for (int at = 0; at < kQuads * kGroupBytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
    }
  }

  /// Eight inputs' codes of each feature as two rows of bytes.
  static void write_pair(const char* from, Group* to) {
#pragma GCC unroll 2
    for (int i = 0; i < kFeatures; i += kLanes<float>) {
      const __m512i both = _mm512_loadu_si512(from + i * sizeof(Group));
      __builtin_prefetch(from + i * sizeof(Group) + kCodesAhead, 0, 2);
      put_bytes(both, to + i);
      put_bytes(_mm512_srli_epi32(both, 4), to + kFeatures + i);
    }
  }

  static void put_bytes(__m512i halves, Group* to) {
    __m512i bytes = _mm512_and_si512(halves, _mm512_set1_epi8(0x0f));
    if constexpr (kSigned) bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(8));
    _mm512_store_si512(to, bytes);
  }

  // The intrinsics are macros that want literal numbers of registers.
#define MTPC_ADD_PAIR(FIRST, SECOND, INPUTS) \
  if constexpr (kSigned) {                   \
    _tile_dpbssd(FIRST, INPUTS, 6);          \
    _tile_dpbssd(SECOND, INPUTS, 7);         \
  } else {                                   \
    _tile_dpbsud(FIRST, INPUTS, 6);          \
    _tile_dpbsud(SECOND, INPUTS, 7);         \
  }

  /// A step's products with up to 16 rows, added to a pair's sums.
  template <int kPair>
  __attribute__((always_inline)) void multiply(const char* x, const Group* weights) const {
    constexpr int64_t kTileBytes = kFeatures * sizeof(Group);
    _tile_loadd(4, x, kRowBlock);
    _tile_loadd(6, weights, kTileBytes);
    _tile_loadd(7, weights + kFeatures / 2, kTileBytes);
    if constexpr (kPair == 0) {
      MTPC_ADD_PAIR(0, 1, 4)
    } else {
      MTPC_ADD_PAIR(2, 3, 4)
    }
  }

  /// Those of the same weights with the rows after these.
  __attribute__((always_inline)) void multiply_others(const char* x) const {
    _tile_loadd(5, x + kTileRows * kRowBlock, kRowBlock);
    MTPC_ADD_PAIR(2, 3, 5)
  }

#undef MTPC_ADD_PAIR

  template <int kPair>
  static __attribute__((always_inline)) void zero_pair() {
    if constexpr (kPair == 0) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  template <int kPair>
  static __attribute__((always_inline)) void store_pair(int32_t* to) {
    constexpr int64_t kRowBytes = kFeatures * sizeof(int32_t);
    if constexpr (kPair == 0) {
      _tile_stored(0, to, kRowBytes);
      _tile_stored(1, to + kFeatures / 2, kRowBytes);
    } else {
      _tile_stored(2, to, kRowBytes);
      _tile_stored(3, to + kFeatures / 2, kRowBytes);
    }
  }

  /// Scales the sums of groups, and adds them to the totals in order.
  void finish(int64_t first, int64_t count, const Sums* sums, float (*totals)[kFeatures]) const {
    scales_.fetch<kMostRows>(first, first + count);
    if (count == kFew) {
      finish_groups(first, std::integral_constant<int64_t, kFew>{}, sums, totals);
    } else {
      finish_groups(first, count, sums, totals);
    }
  }

  template <class Count>
  void finish_groups(
      int64_t first, Count count, const Sums* sums, float (*totals)[kFeatures]) const {
    for (int feature = 0; feature < kFeatures; feature += kLanes<float>) {
      Vec<float> scales[kFew];
      for (int64_t g = 0; g < count; ++g) scales[g] = scales_.scale(first + g, feature);
      for (int64_t r = 0; r < rows_; ++r) {
        Vec<float> total = load<float>(totals[r] + feature);
        for (int64_t g = 0; g < count; ++g) {
          Groups sum;
          std::memcpy(&sum, sums[g] + r * kFeatures + feature, sizeof(sum));
          const int64_t at = (first + g) * x_rows_ + r;
          if (!kSigned && scales_.has_zeros()) {
            sum += scales_.zero(first + g, feature) * x_offsets_[at];
          } else if (!kSigned && !scales_.has_mins()) {
            sum += x_offsets_[at];
          }
          total = multiply_add(__builtin_convertvector(sum, Vec<float>),
                               scales[g] * x_steps_[at], total);
          if (kSigned || !scales_.has_mins()) continue;
          const Vec<float> offset = Vec<float>{} + static_cast<float>(x_offsets_[at]);
          total = multiply_add(offset, scales_.min(first + g, feature) * x_steps_[at], total);
        }
        store(totals[r] + feature, total);
      }
    }
  }

  const char* x_;
  int64_t stride_, rows_;
  bool goes_on_;
  const char *codes_, *ahead_;
  int64_t ahead_step_;
  TileScales scales_;
  const float* x_steps_;
  const int32_t* x_offsets_;
  int64_t x_rows_, groups_, steps_;
  alignas(64) Bytes bytes_[kInt4 ? 2 * kFew : 1];
  alignas(64) Sums sums_[2][kFew];
};

template <bool kInt4, bool kSigned, int kQuads>
void multiply(const GroupedRows& x, int64_t row, int64_t rows, const GroupedWeight& tile,
              float (*totals)[kFeatures]) {
  if (rows > kTileRows) {
    RegisterProduct<kInt4, kSigned, true, kQuads>(x, row, rows, tile)(totals);
  } else {
    RegisterProduct<kInt4, kSigned, false, kQuads>(x, row, rows, tile)(totals);
  }
}

template <int kQuads>
void multiply_steps(const GroupedRows& x, int64_t row, int64_t rows, const GroupedWeight& tile,
                    float (*totals)[kFeatures]) {
  if (tile.form.kind == CodeKind::kInt8) {
    multiply<false, false, kQuads>(x, row, rows, tile, totals);
  } else if (tile.zeros) {
    multiply<true, false, kQuads>(x, row, rows, tile, totals);
  } else {
    multiply<true, true, kQuads>(x, row, rows, tile, totals);
  }
}

}  // namespace

void multiply_in_registers(const GroupedRows& x, int64_t row, int64_t rows,
                           const GroupedWeight& tile, PassRegisters& registers,
                           float (*totals)[kFeatures]) {
  const int64_t quads = step_quads(tile.form);
  registers.set_shape(rows, quads);
  const auto run = quads == kTileRows ? multiply_steps<kTileRows> : multiply_steps<kTileRows / 2>;
  run(x, row, rows, tile, totals);
}

}  // namespace mtpc
#endif
