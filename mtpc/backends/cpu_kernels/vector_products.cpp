// Products with packed weights in vector registers, for each number of rows. Levels with tile
// registers use those instead.
#if !defined(__AMX_TILE__)

#include "vector_products.h"

#include <utility>

namespace mtpc {
namespace {

/// Registers of sums that a row of a tile takes.
constexpr int kRegisters = kFeatures / kLanes<float>;

/// Groups of inputs per turn of the loop. A single row waits only for memory. With products of
/// pairs, the processor itself fetches furthest ahead if a turn has four groups. With multiply-adds
/// (on Intel's processors), or more rows, that is slower.
template <int kRows>
constexpr int kTurn = kPairProducts && kRows == 1 ? 4 : 1;

/// kRows rows times one tile. Every sum runs over the inputs in order, whatever kRows is.
template <int kRows>
void multiply_some(InputRows x, const Group* tile, Fetch fetch, TileSums<kMostRows>& out) {
  constexpr int kCache = kRows <= kStreamedRows ? kPassing : 2;
  Vec<float> sums[kRows][kRegisters]{};
  Inputs<kRows> inputs;
  const auto add_group = [&](int64_t k) __attribute__((always_inline)) {
    Groups weights[kRegisters];
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      const char* from = reinterpret_cast<const char*>(tile) + i * kVectorBytes;
      std::memcpy(&weights[i], from, kVectorBytes);
    }
    __builtin_prefetch(fetch.from, 0, kCache);
    __builtin_prefetch(fetch.from + fetch.step / 2, 0, kCache);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = inputs.add(sums[r][i], r, k, weights[i]);
      }
    }
    tile += kFeatures;
    fetch.from += fetch.step;
  };
  for (int64_t begin = 0; begin < x.groups; begin += inputs.kGroups) {
    const int64_t count = std::min(inputs.kGroups, x.groups - begin);
    inputs.take(x, begin, count);
    int64_t k = 0;
    for (; k + kTurn<kRows> <= count; k += kTurn<kRows>) {
#pragma GCC unroll 4
      for (int i = 0; i < kTurn<kRows>; ++i) add_group(k + i);
    }
    for (; k < count; ++k) add_group(k);
  }
  // One by one: a copy of the whole array would keep it in memory, not in registers.
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      std::memcpy(out[r] + i * kLanes<float>, &sums[r][i], kVectorBytes);
    }
  }
}

template <int... kRows>
constexpr std::array<MultiplySome, sizeof...(kRows)> all_products(
    std::integer_sequence<int, kRows...>) {
  return {multiply_some<kRows + 1>...};
}

}  // namespace

constexpr std::array<MultiplySome, kMostRows> kMultiplySome =
    all_products(std::make_integer_sequence<int, kMostRows>{});

}  // namespace mtpc

#endif
