// Codes of 4 to 6 bits, codes that are places in a table, and scales of super-blocks: made bytes and
// floats, some inputs at a time, for products that take these.
#pragma once

#include "grouped_rows.h"

namespace mtpc {

/// Inputs of a tile that are unpacked at a time: some super-blocks. Their bytes stay in the
/// first-level cache, whatever the number of rows that are multiplied by them.
inline constexpr int64_t kUnpacked = 2 * kSuper;

/// A part of a tile, unpacked.
class UnpackedPart {
 public:
  /// Unpacks a tile's inputs from `first` on, a multiple of kUnpacked; those of the tile's end may be
  /// fewer. Returns them as a weight of one tile, which lives as long as this and the tile. Codes that
  /// products take as stored stay where they are, but `as_bytes`.
  GroupedWeight take(const GroupedWeight& tile, int64_t first, bool as_bytes);

 private:
  static constexpr int64_t kFewestOfGroup = 8;

  alignas(64) char codes_[kUnpacked * kFeatures];
  alignas(64) float scales_[kUnpacked / kFewestOfGroup * kFeatures];
  alignas(64) float mins_[kUnpacked / kFewestOfGroup * kFeatures];
};

}  // namespace mtpc
