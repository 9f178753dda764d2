// Products with packed weights in vector registers.
#pragma once

#include <array>

#include "product_rows.h"

namespace mtpc {

/// Dense rows, copied further apart if several would share a set of the first-level cache.
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

/// Rows that share one pass over a tile: as many as leave registers for weights and inputs.
inline constexpr int kMostRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 3 : 1;

/// Up to this many rows, products wait only for memory, and weights are fetched into the
/// first-level cache. More rows need that cache themselves. Each of several passes over a tile has
/// more rows than this, and fetches for the next pass. Only AVX-512 was measured.
inline constexpr int64_t kStreamedRows = kVectorBytes == 64 ? 5 : 0;

/// How many bytes ahead of the weights in use are fetched, as measured (docs/performance.md).
inline int64_t bytes_ahead(int64_t rows) {
  if (kVectorBytes < 64) return 4096;
  const bool is_near = rows <= kStreamedRows && !(kPairProducts && rows == 1);
  return is_near ? 4096 : 8192;
}

/// What one of `passes` over a tile, with `rows` rows, fetches.
inline Fetch fetch_in_pass(const char* tile, int64_t groups, int64_t pass, int64_t passes,
                           int64_t rows) {
  if (passes > 1) return fetch_next(tile, groups, pass, passes);
  return {tile + bytes_ahead(rows), kGroupBytes};
}

/// A number of rows times one tile.
using MultiplySome = void (*)(InputRows, const Group*, Fetch, TileSums<kMostRows>&);

/// Indexed by the number of rows, less one.
extern const std::array<MultiplySome, kMostRows> kMultiplySome;

/// Up to kMostRows rows times one tile.
inline void multiply_rows(InputRows x, int64_t rows, const Group* tile, Fetch fetch,
                          TileSums<kMostRows>& out) {
  kMultiplySome[rows - 1](x, tile, fetch, out);
}

/// Vector registers need no setting up.
struct PassRegisters {
  void set_rows(int64_t) {}
};

}  // namespace mtpc
