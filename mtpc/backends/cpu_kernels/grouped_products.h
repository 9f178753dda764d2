// Products of rows with packed codes of 4 or 8 bits, and their sums over groups of inputs.
#pragma once

#include <algorithm>
#include <array>

#include "grouped_tiles.h"
#include "unpack.h"

namespace mtpc {

/// Rows that share one pass over a tile. Where a row is one group of int8, only its sums are in
/// registers until its end, so that more rows fit.
inline constexpr int kMostGroupedRows = kVectorBytes >= 32 ? 8 : 1;
inline constexpr int kMostWholeRows = kVectorBytes == 64 ? 12 : kMostGroupedRows;

/// Sums of one tile's features, by row.
using GroupedSums = float (*)[kFeatures];

/// A number of rows from one on times one tile. A tile that begins with other inputs than the first
/// adds to the sums.
using MultiplyGrouped = void (*)(const GroupedRows&, int64_t, const GroupedWeight&, GroupedSums);

/// By the number of rows less one.
using MultiplyRows = std::array<MultiplyGrouped, kMostWholeRows>;

/// By the kind of codes. For more than kMostGroupedRows rows there are products of int8 only.
extern const std::array<MultiplyRows, 5> kMultiplyGrouped;

/// How rows share passes over a tile.
class Passes {
 public:
  Passes(int64_t rows, const GroupedWeight& tile)
      : multiply_(kMultiplyGrouped[static_cast<int>(tile.form.kind)]) {
#if defined(__AMX_TILE__)
    by_registers_ = go_by_registers(rows, tile.form);
#endif
    const bool is_whole = tile.form.kind == CodeKind::kInt8 && tile.form.groups() == 1;
    most_ = by_registers_ ? kMostRows : is_whole ? kMostWholeRows : kMostGroupedRows;
  }

  /// Rows of a pass.
  int64_t most() const { return most_; }

  /// Sums of `rows` rows from `first` on.
  void multiply(const GroupedRows& x, int64_t first, int64_t rows, const GroupedWeight& tile,
                [[maybe_unused]] PassRegisters& registers, GroupedSums sums) const {
    const int64_t passes = (rows + most_ - 1) / most_;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass * rows / passes, count = (pass + 1) * rows / passes - row;
#if defined(__AMX_TILE__)
      if (by_registers_) {
        multiply_in_registers(x, first + row, count, tile, registers, sums + row);
        continue;
      }
#endif
      multiply_[count - 1](x, first + row, tile, sums + row);
    }
  }

 private:
  const MultiplyRows& multiply_;
  bool by_registers_ = false;
  int64_t most_;
};

/// Whether codes that products of vectors look up become bytes first, for registers of AMX.
inline bool needs_bytes([[maybe_unused]] int64_t rows, [[maybe_unused]] const GroupedWeight& tile) {
#if defined(__AMX_TILE__)
  return tile.is_looked_up() && go_by_registers(rows, tile.form);
#else
  return false;
#endif
}

/// Rows that are multiplied by a part of a tile before the next part is unpacked.
inline constexpr int64_t kMostOfPart = 128;

/// `rows` rows from `first` on times one tile; body(row, its 32 sums), row from 0 on, for each.
/// Registers are a thread's own.
template <class Body>
void for_grouped_products(const GroupedRows& x, int64_t first, int64_t rows,
                          const GroupedWeight& tile, PassRegisters& registers, const Body& body) {
  const Passes passes(rows, tile);
  const auto go = [&](int64_t most, GroupedSums sums, const auto& sum) {
    const int64_t runs = (rows + most - 1) / most;
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t row = run * rows / runs, count = (run + 1) * rows / runs - row;
      sum(first + row, count);
      for (int64_t r = 0; r < count; ++r) body(row + r, sums[r]);
    }
  };
  const bool as_bytes = needs_bytes(rows, tile);
  if (!tile.is_packed() && !as_bytes) {
    alignas(64) float sums[std::max(kMostRows, kMostWholeRows)][kFeatures];
    return go(passes.most(), sums, [&](int64_t row, int64_t count) {
      passes.multiply(x, row, count, tile, registers, sums);
    });
  }
  alignas(64) float sums[kMostOfPart][kFeatures];
  UnpackedPart part;
  go(kMostOfPart, sums, [&](int64_t row, int64_t count) {
    for (int64_t input = 0; input < tile.form.inputs; input += kUnpacked) {
      passes.multiply(x, row, count, part.take(tile, input, as_bytes), registers, sums);
    }
  });
}

}  // namespace mtpc
