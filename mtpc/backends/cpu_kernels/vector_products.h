// Products with packed weights in vector registers.
#pragma once

#include <array>
#include <utility>

#include "product_rows.h"

namespace mtpc {

/// Dense rows, copied further apart where several would be in one set of the first-level cache.
inline InputRows rows_for_products(const BFloat16* first, int64_t rows, int64_t inputs,
                                   Buffer<char>& copy) {
  constexpr int64_t kFewRows = 5;
  InputRows result = dense_rows(first, inputs);
  const int64_t bytes = inputs * sizeof(BFloat16), step = spaced(bytes);
  if (rows < kFewRows || step == bytes) return result;
  char* to = copy.reserve(rows * step);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * step, first + r * inputs, bytes);
  result.first = reinterpret_cast<const Group*>(to);
  result.stride = step / sizeof(Group);
  return result;
}

/// Registers of sums that a row of a tile takes.
inline constexpr int kRegisters = kFeatures / kLanes<float>;

/// Rows that share one pass over a tile: as many as leave registers for weights and inputs.
inline constexpr int kMostRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 3 : 1;

/// Up to this many rows, products wait for memory alone, and weights are fetched into the first-level
/// cache; more rows need the room there. Each of several passes over a tile has more rows than this,
/// and fetches for the next pass. Other levels than AVX-512 were not measured.
inline constexpr int64_t kStreamedRows = kVectorBytes == 64 ? 5 : 0;

/// Bytes ahead of the weights in use that are fetched meanwhile, as measured (docs/performance.md).
inline int64_t bytes_ahead(int64_t rows) {
  return kVectorBytes < 64 || rows <= kStreamedRows ? 4096 : 8192;
}

/// What one of `passes` over a tile fetches, in which `rows` go by.
inline Fetch fetch_in_pass(const char* tile, int64_t groups, int64_t pass, int64_t passes,
                           int64_t rows) {
  if (passes > 1) return fetch_next(tile, groups, pass, passes);
  return {tile + bytes_ahead(rows), kGroupBytes};
}

/// Groups of inputs per turn of the loop. One row alone waits only for memory: with four groups per
/// turn, and no prefetch instructions, the processor itself fetches furthest ahead. With more rows
/// that is slower, and without AVX-512 it was not measured.
template <int kRows>
inline constexpr int kTurn = kVectorBytes == 64 && kRows == 1 ? 4 : 1;

/// kRows rows times one tile. Every sum runs over the inputs in order, whatever kRows is.
template <int kRows>
void multiply_some(InputRows x, const Group* tile, Fetch fetch, TileSums<kMostRows>& out) {
  constexpr int kCache = kRows <= kStreamedRows ? 3 : 2;
  Vec<float> sums[kRows][kRegisters]{};
  const auto add_group = [&](int64_t k) __attribute__((always_inline)) {
    Groups weights[kRegisters];
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      const char* from = reinterpret_cast<const char*>(tile) + i * kVectorBytes;
      std::memcpy(&weights[i], from, kVectorBytes);
    }
    if constexpr (kTurn<kRows> == 1) {
      __builtin_prefetch(fetch.from, 0, kCache);
      __builtin_prefetch(fetch.from + fetch.step / 2, 0, kCache);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Group group = x.first[r * x.stride + k];
#pragma GCC unroll 8
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = add_pairs(sums[r][i], weights[i], Groups{} + group);
      }
    }
    tile += kFeatures;
    fetch.from += fetch.step;
  };
  int64_t k = 0;
  for (; k + kTurn<kRows> <= x.groups; k += kTurn<kRows>) {
#pragma GCC unroll 4
    for (int i = 0; i < kTurn<kRows>; ++i) add_group(k + i);
  }
  for (; k < x.groups; ++k) add_group(k);
  // One by one: copied as a whole they would live in memory, not in registers.
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      std::memcpy(out[r] + i * kLanes<float>, &sums[r][i], kVectorBytes);
    }
  }
}

using MultiplySome = void (*)(InputRows, const Group*, Fetch, TileSums<kMostRows>&);

template <int... kRows>
constexpr std::array<MultiplySome, sizeof...(kRows)> multiply_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_some<kRows + 1>...};
}

/// By the number of rows, less one.
inline constexpr auto kMultiply = multiply_table(std::make_integer_sequence<int, kMostRows>{});

/// Up to kMostRows rows times one tile.
inline void multiply_rows(InputRows x, int64_t rows, const Group* tile, Fetch fetch,
                          TileSums<kMostRows>& out) {
  kMultiply[rows - 1](x, tile, fetch, out);
}

/// Vector registers need no setting up.
struct PassRegisters {
  void set_rows(int64_t) {}
};

}  // namespace mtpc
