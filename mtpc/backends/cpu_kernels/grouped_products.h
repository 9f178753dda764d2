// Products of rows with packed codes of 4 or 8 bits, and their sums over groups of inputs.
#pragma once

#include <algorithm>
#include <array>

#include "grouped_tiles.h"

namespace mtpc {

/// Rows that share one pass over a tile. Where a row is one group of int8, only its sums are in
/// registers until its end, so that more rows fit.
inline constexpr int kMostGroupedRows = kVectorBytes >= 32 ? 8 : 1;
inline constexpr int kMostWholeRows = kVectorBytes == 64 ? 12 : kMostGroupedRows;

/// Sums of one tile's features, by row.
using GroupedSums = float[kMostWholeRows][kFeatures];

/// A number of rows from one on times one tile.
using MultiplyGrouped = void (*)(const GroupedRows&, int64_t, const GroupedWeight&, GroupedSums&);

/// By the number of rows less one.
using MultiplyRows = std::array<MultiplyGrouped, kMostWholeRows>;

/// By the kind of codes. For more than kMostGroupedRows rows there are products of int8 only.
extern const std::array<MultiplyRows, 3> kMultiplyGrouped;

/// `rows` rows from `first` on times one tile; body(row, its 32 sums), row from 0 on, for each.
/// Registers are a thread's own.
template <class Body>
void for_grouped_products(const GroupedRows& x, int64_t first, int64_t rows,
                          const GroupedWeight& tile, [[maybe_unused]] PassRegisters& registers,
                          const Body& body) {
  const MultiplyRows& multiply = kMultiplyGrouped[static_cast<int>(tile.form.kind)];
  const auto go = [&](int64_t most, auto multiply_pass) {
    const int64_t passes = (rows + most - 1) / most;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass * rows / passes, count = (pass + 1) * rows / passes - row;
      multiply_pass(row, count);
    }
  };
#if defined(__AMX_TILE__)
  if (go_by_registers(rows, tile.form)) {
    return go(kMostRows, [&](int64_t row, int64_t count) {
      alignas(64) float sums[kMostRows][kFeatures];
      multiply_in_registers(x, first + row, count, tile, registers, sums);
      for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
    });
  }
#endif
  const bool is_whole = tile.form.kind == CodeKind::kInt8 && tile.form.groups() == 1;
  go(is_whole ? kMostWholeRows : kMostGroupedRows, [&](int64_t row, int64_t count) {
    GroupedSums sums;
    multiply[count - 1](x, first + row, tile, sums);
    for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
  });
}

}  // namespace mtpc
