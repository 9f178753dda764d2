// Products with packed weights: one stream of weights, whatever the number of rows.
#pragma once

#if defined(__AMX_TILE__)
#include "tile_phases.h"
#else
#include "vector_products.h"
#endif

namespace mtpc {

/// Whether a weight is so many features of so many inputs, packed in bfloat16.
inline bool is_packed_linear(const Tensor& weight, int64_t features, int64_t inputs) {
  return weight.scalar_type() == ScalarType::BFloat16 && weight.dim() == 4 &&
      weight.is_contiguous() && weight.size(0) == count_tiles(features) &&
      2 * weight.size(1) == inputs && weight.size(2) == kFeatures && weight.size(3) == 2;
}

/// Rows of x times one tile; body(row, its 32 sums) for each. Registers are a thread's own.
template <class Body>
void for_products(InputRows x, int64_t rows, const void* tile, PassRegisters& registers,
                  const Body& body) {
  const Group* weights = static_cast<const Group*>(tile);
#if defined(__AMX_TILE__)
  if (rows >= kManyRows) return multiply_in_blocks(x, rows, weights, registers, body);
#endif
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = pass * rows / passes, count = (pass + 1) * rows / passes - row;
    const auto fetch =
        fetch_in_pass(static_cast<const char*>(tile), x.groups, pass, passes, count);
    registers.set_rows(count);
    TileSums<kMostRows> sums;
    multiply_rows(x.from(row, 0, x.groups), count, weights, fetch, sums);
    for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
  }
}

/// Whether all rows go by a tile at once, and not by parts of all tiles.
inline bool goes_by_tiles([[maybe_unused]] InputRows x, [[maybe_unused]] int64_t rows) {
#if defined(__AMX_TILE__)
  return !need_phases(x, rows);
#else
  return true;
#endif
}

/// Rows of x times `tiles` tiles on several threads; body(tile, row, its 32 sums) for each.
template <class Body>
void for_all_products(InputRows x, int64_t rows, const void* weights, int64_t tiles,
                      int64_t workers, const Body& body) {
  const char* bytes = static_cast<const char*>(weights);
#if defined(__AMX_TILE__)
  if (need_phases(x, rows)) {
    const Group* all = static_cast<const Group*>(weights);
    return multiply_in_phases(x, rows, all, tiles, workers, body);
  }
#endif
  run_stream<PassRegisters>(tiles, workers, [&](int64_t tile, PassRegisters& registers) {
    for_products(x, rows, bytes + tile * x.groups * kGroupBytes, registers,
                 [&](int64_t row, const float* sums) { body(tile, row, sums); });
  });
}

}  // namespace mtpc
