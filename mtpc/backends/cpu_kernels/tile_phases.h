// Products of many rows, with AMX: weights in blocks that the first-level cache holds.
//
// Two registers of inputs and two of weights make four products. The second-level cache alone
// cannot deliver these registers as fast as the products need them. So a block of a tile's weights
// stays in the first level while many rows pass, and sums wait in memory meanwhile. That is exact:
// sums run over the inputs in order, as they do without blocks. Rows that do not fit into the
// second level would be read from the third again for each tile of weights, at the speed of memory.
// Such rows are processed in phases: a phase takes some of their inputs, with all tiles.
#pragma once

#include "tensors.h"
#include "tile_products.h"

namespace mtpc {

/// From this many rows on, blocks save more than storing and loading the sums costs.
inline constexpr int64_t kManyRows = 128;

/// Groups of a block, and rows that pass it together: 16 KB of a tile and 16 KB of sums, of the 48
/// KB of a first-level cache.
inline constexpr int64_t kBlockGroups = 8 * kTileRows;
inline constexpr int64_t kBlockRows = 128;

/// Bytes of inputs that stay in the second-level cache beside weights and sums, and groups of a row
/// that do so beside as many of a tile.
inline constexpr int64_t kCachedBytes = 1 << 20;
inline constexpr int64_t kCachedGroups = 1024;

/// Groups of a phase, and rows that go through it together.
inline constexpr int64_t kPhaseGroups = 512;
inline constexpr int64_t kPhaseRows = 256;

/// Whether rows are processed in phases.
inline bool need_phases(InputRows x, int64_t rows) {
  const int64_t bytes = rows * x.groups * static_cast<int64_t>(sizeof(Group));
  return bytes > kCachedBytes || (rows >= kManyRows && x.groups > kCachedGroups);
}

/// Adds rows times one tile's part to `sums`, or begins them.
inline void add_tile(InputRows x, int64_t rows, const Group* tile, TileFetch fetch, bool begun,
                     PassRegisters& registers, float (*sums)[kFeatures]) {
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
      add_rows(x.from(row, group, groups), count, tile + group * kFeatures, fetch);
      store_sums(sums + row, count);
      fetch.from += groups * fetch.step;
    }
  }
}

/// What one add_tile fetches of the next tile, if it is called for parts of `all` rows.
inline TileFetch share_of(const Group* next, int64_t all) {
  const int64_t step = kGroupBytes * kMostRows / std::max<int64_t>(all, kMostRows);
  return {{reinterpret_cast<const char*>(next), step}};
}

/// As for_products, for kManyRows or more.
template <class Body>
void multiply_in_blocks(InputRows x, int64_t rows, const Group* tile, PassRegisters& registers,
                        const Body& body) {
  alignas(64) float sums[kBlockRows][kFeatures];
  TileFetch fetch = share_of(tile + x.groups * kFeatures, rows);
  for (int64_t first = 0; first < rows; first += kBlockRows) {
    const int64_t count = std::min(kBlockRows, rows - first);
    add_tile(x.from(first, 0, x.groups), count, tile, fetch, false, registers, sums);
    fetch.from += (count + kMostRows - 1) / kMostRows * x.groups * fetch.step;
    for (int64_t r = 0; r < count; ++r) body(first + r, sums[r]);
  }
}

/// As for_all_products, for rows that need_phases.
template <class Body>
void multiply_in_phases(InputRows x, int64_t rows, const Group* weights, int64_t tiles,
                        int64_t workers, const Body& body) {
  using Row = float[kFeatures];
  const Buffer<float> all_sums(tiles * std::min(rows, kPhaseRows) * kFeatures);
  for (int64_t first = 0; first < rows; first += kPhaseRows) {
    const int64_t count = std::min(kPhaseRows, rows - first);
    for (int64_t group = 0; group < x.groups; group += kPhaseGroups) {
      const InputRows part = x.from(first, group, std::min(kPhaseGroups, x.groups - group));
      const bool last = group + part.groups == x.groups;
      run_stream<PassRegisters>(tiles, workers, [&](int64_t tile, PassRegisters& registers) {
        Row* sums = reinterpret_cast<Row*>(all_sums.get()) + tile * count;
        const Group* from = weights + (tile * x.groups + group) * kFeatures;
        const TileFetch fetch = share_of(from + x.groups * kFeatures, count);
        add_tile(part, count, from, fetch, group > 0, registers, sums);
        for (int64_t r = 0; last && r < count; ++r) body(tile, first + r, sums[r]);
      });
    }
  }
}

}  // namespace mtpc
