// Products of so many rows that their inputs do not stay in the second-level cache, with AMX.
//
// Each tile of weights would take the rows from the third level again, at the speed of memory. They
// are gone through in phases of some of their inputs instead, all tiles in each; in a phase a tile's
// weights in blocks that the first level holds while the rows go by. Sums wait in memory meanwhile,
// which is exact: they run over the inputs in order, as they do without phases.
#pragma once

#include "tensors.h"
#include "tile_products.h"

namespace mtpc {

/// Bytes of inputs that stay in the second-level cache beside weights and sums.
inline constexpr int64_t kCachedBytes = 1 << 20;

/// Rows gone through together, and groups of a phase: half as many bytes.
inline constexpr int64_t kPhaseRows = 256;
inline constexpr int64_t kPhaseGroups = 512;

/// Groups of a block: 16 KB of a tile, a third of the first-level cache.
inline constexpr int64_t kBlockGroups = 8 * kTileRows;

/// Adds rows times one tile's part to `sums`, or begins them; meanwhile fetches the same part of the
/// next tile, which lies `tile_groups` groups on.
template <class Dot>
void add_tile(InputRows x, int64_t rows, const Group* tile, int64_t tile_groups, bool begun,
              typename Dot::Sum (*sums)[kFeatures]) {
  const int64_t step = kGroupBytes * kMostRows / std::max<int64_t>(rows, kMostRows);
  const char* next = reinterpret_cast<const char*>(tile + tile_groups * kFeatures);
  PassRegisters registers;
  for (int64_t group = 0; group < x.groups; group += kBlockGroups) {
    const int64_t groups = std::min(kBlockGroups, x.groups - group);
    for (int64_t row = 0; row < rows; row += kMostRows) {
      const int64_t count = std::min<int64_t>(kMostRows, rows - row);
      registers.set_rows(count);
      if (begun || group > 0) {
        load_sums(sums + row, count);
      } else {
        zero_sums(count);
      }
      add_rows<Dot>(x.from(row, group, groups), count, tile + group * kFeatures, {next, step});
      store_sums(sums + row, count);
      next += groups * step;
    }
  }
}

/// As for_all_products.
template <class Dot, class Body>
void multiply_in_phases(InputRows x, int64_t rows, const Group* weights, int64_t tiles,
                        int64_t workers, const Body& body) {
  using Row = typename Dot::Sum[kFeatures];
  const Buffer<typename Dot::Sum> all_sums(tiles * std::min(rows, kPhaseRows) * kFeatures);
  for (int64_t first = 0; first < rows; first += kPhaseRows) {
    const int64_t count = std::min(kPhaseRows, rows - first);
    for (int64_t group = 0; group < x.groups; group += kPhaseGroups) {
      const InputRows part = x.from(first, group, std::min(kPhaseGroups, x.groups - group));
      const bool last = group + part.groups == x.groups;
      run_stream(tiles, workers, [&](int64_t tile) {
        Row* sums = reinterpret_cast<Row*>(all_sums.get()) + tile * count;
        const Group* from = weights + (tile * x.groups + group) * kFeatures;
        add_tile<Dot>(part, count, from, x.groups, group > 0, sums);
        for (int64_t r = 0; last && r < count; ++r) body(tile, first + r, sums[r]);
      });
    }
  }
}

}  // namespace mtpc
