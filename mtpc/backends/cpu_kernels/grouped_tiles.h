// Products of several rows with packed codes of 4 or 8 bits, with AMX.
//
// A group's products are added in tile registers, and its sums go to memory: as integers they are
// those of grouped_products.h, bit for bit. There they are scaled and added row by row, in the same
// order as those.
#pragma once

#include "grouped_rows.h"
#include "packed.h"

namespace mtpc {

#if defined(__AMX_TILE__)
/// Groups of 32 bits that a step of tile registers takes of each row, for a weight of this form; 0
/// where its groups of inputs are no multiple of a step.
inline int64_t step_quads(const GroupForm& form) {
  constexpr int64_t kQuad = 4;
  if (form.kind == CodeKind::kFloat8) return 0;
  for (const int64_t quads : {kTileRows, kTileRows / 2}) {
    if (form.group % (kQuad * quads) == 0) return quads;
  }
  return 0;
}

/// Whether tile registers are faster than vectors for so many rows. Sums of short groups spend much
/// time on their way to memory.
inline bool go_by_registers(int64_t rows, const GroupForm& form) {
  constexpr int64_t kFewestRows = 6, kFewestOfShort = 9, kShort = 32;
  return rows >= (form.group <= kShort ? kFewestOfShort : kFewestRows) && step_quads(form) > 0;
}

/// Sums of up to 32 rows from `row` on times one tile.
void multiply_in_registers(const GroupedRows& x, int64_t row, int64_t rows,
                           const GroupedWeight& tile, PassRegisters& registers,
                           float (*totals)[kFeatures]);
#endif

}  // namespace mtpc
