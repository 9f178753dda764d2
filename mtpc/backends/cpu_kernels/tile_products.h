// AMX's tile registers, of 16 rows of 64 bytes each: products of up to 32 rows with packed weights.
//
// The layout is that of all levels: 16 groups of a tile of 32 features are 16 rows of 128 bytes,
// the two halves of which are two registers as the instructions want them. Sums run over the
// inputs 16 groups at a time, in order; a row's do not depend on how many rows there are.
// mtpc/store/machine.py asks the system for leave to use the registers when the level is chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "product_rows.h"

namespace mtpc {

/// Rows of a register, and groups in one of them.
inline constexpr int kTileRows = 16;

/// Two registers of inputs, two of weights and four of sums: all there are.
inline constexpr int kMostRows = 2 * kTileRows;

/// The rows as they are. A load takes all 64 bytes of a row's line at once, so a line that other
/// rows evict from the cache is not fetched again.
inline InputRows rows_for_products(const BFloat16* first, int64_t, int64_t inputs, Buffer<char>&) {
  return dense_rows(first, inputs);
}

/// With this many passes over a tile or more, arithmetic is the limit, and each pass fetches a part
/// of the next tile. With fewer, it is faster if the first pass reads memory at full speed.
inline constexpr int64_t kSlowPasses = 3;

/// What one of `passes` over a tile fetches.
struct TileFetch : Fetch {
  bool streams = false;  // Takes the tile from memory, and reads each block before its use.
};

inline TileFetch fetch_in_pass(const char* tile, int64_t groups, int64_t pass, int64_t passes,
                               int64_t) {
  if (passes >= kSlowPasses) return {fetch_next(tile, groups, pass, passes)};
  return {{nullptr, 0}, pass == 0};
}

/// The operand of LDTILECFG: registers 0 and 1 are sums of the first 16 rows, 2 and 3 of the
/// others, 4 and 5 their inputs, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  /// For `count` rows, of each of which a step takes `groups` groups, and `columns` features.
  TileConfig(int64_t count, int groups, int columns) {
    const int first = std::min<int64_t>(count, kTileRows);
    const int second = count > kTileRows ? count - kTileRows : first;
    const int used[] = {first, first, second, second, first, second, groups, groups};
    for (int i = 0; i < 8; ++i) {
      const bool are_inputs = i == 4 || i == 5;
      rows[i] = used[i];
      bytes[i] = used[i] ? (are_inputs ? groups : columns) * sizeof(Group) : 0;
    }
  }
};

/// Keeps writes before tile instructions, because the compiler does not know what these read.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

/// Adds 16 groups of up to 16 rows (up to 32 if kBoth), `stride` groups apart, times 16 groups of a
/// tile.
template <bool kBoth>
void add_products(const Group* x, int64_t stride, const Group* tile) {
  const int64_t row_bytes = stride * sizeof(Group);
  constexpr int64_t kTileBytes = kFeatures * sizeof(Group);
  _tile_loadd(6, tile, kTileBytes);
  _tile_loadd(4, x, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, tile + kFeatures / 2, kTileBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kBoth) {
    _tile_loadd(5, x + kTileRows * stride, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// As add_products, for the last groups, fewer than 16, padded with zeros.
template <bool kBoth>
void add_last_products(InputRows x, const Group* tile, int64_t rows, int64_t done) {
  alignas(64) Group inputs[kMostRows][kTileRows] = {}, weights[kTileRows][kFeatures] = {};
  const int64_t left = x.groups - done;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(inputs[r], x.first + r * x.stride + done, left * sizeof(Group));
  }
  std::memcpy(weights, tile + done * kFeatures, left * sizeof(weights[0]));
  settle_memory();
  add_products<kBoth>(inputs[0], kTileRows, weights[0]);
}

/// Clear, load and store the registers' sums of up to 32 rows.
inline void zero_sums(int64_t rows) {
  _tile_zero(0);
  _tile_zero(1);
  if (rows <= kTileRows) return;
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_sums(const float (*from)[kFeatures], int64_t rows) {
  _tile_loadd(0, from[0], sizeof(*from));
  _tile_loadd(1, from[0] + kFeatures / 2, sizeof(*from));
  if (rows <= kTileRows) return;
  _tile_loadd(2, from[kTileRows], sizeof(*from));
  _tile_loadd(3, from[kTileRows] + kFeatures / 2, sizeof(*from));
}

inline void store_sums(float (*to)[kFeatures], int64_t rows) {
  _tile_stored(0, to[0], sizeof(*to));
  _tile_stored(1, to[0] + kFeatures / 2, sizeof(*to));
  if (rows <= kTileRows) return;
  _tile_stored(2, to[kTileRows], sizeof(*to));
  _tile_stored(3, to[kTileRows] + kFeatures / 2, sizeof(*to));
}

/// Loads the 2 KB of a tile that 16 groups have, every kEvery-th line first, each by an instruction of
/// its own: then the processor's own prefetchers run well ahead, and memory is read at its speed.
/// Loads of tile registers, every other line in order, leave a tenth of it, fetched ahead or not.
template <int kEvery>
inline void read_block(const Group* block) {
  constexpr int kLines = kTileRows * kGroupBytes / kVectorBytes;
  const char* from = reinterpret_cast<const char*>(block);
#pragma GCC unroll 4
  for (int first = 0; first < kEvery; ++first) {
#pragma GCC unroll 16
    for (int line = first; line < kLines; line += kEvery) {
      __asm__ volatile("" : : "v"(_mm512_loadu_si512(from + line * kVectorBytes)));
    }
  }
}

template <bool kBoth>
void add_groups(InputRows x, int64_t rows, const Group* tile, TileFetch fetch) {
  constexpr int64_t kLine = 64;
  settle_memory();  // The rows, which this thread may just have written.
  int64_t done = 0;
  for (; done + kTileRows <= x.groups; done += kTileRows) {
    for (int64_t at = 0; at < kTileRows * fetch.step; at += kLine) {
      __builtin_prefetch(fetch.from + at, 0, 2);
    }
    fetch.from += kTileRows * fetch.step;
    if (fetch.streams) read_block<kBoth ? 2 : 4>(tile + done * kFeatures);
    add_products<kBoth>(x.first + done, x.stride, tile + done * kFeatures);
  }
  if (done < x.groups) add_last_products<kBoth>(x, tile, rows, done);
}

/// Adds up to 32 rows times one tile to the registers' sums.
inline void add_rows(InputRows x, int64_t rows, const Group* tile, TileFetch fetch) {
  if (rows > kTileRows) {
    add_groups<true>(x, rows, tile, fetch);
  } else {
    add_groups<false>(x, rows, tile, fetch);
  }
}

/// Up to 32 rows times one tile; the registers are configured for as many.
inline void multiply_rows(InputRows x, int64_t rows, const Group* tile, TileFetch fetch,
                          TileSums<kMostRows>& out) {
  zero_sums(rows);
  add_rows(x, rows, tile, fetch);
  store_sums(out, rows);
}

/// Configures the registers for passes of different numbers of rows, and releases them. It does so as
/// rarely as possible: once a tile would take a tenth of the time of many rows. Meanwhile nothing
/// else on this thread may use the registers.
class PassRegisters {
 public:
  PassRegisters() = default;
  PassRegisters(const PassRegisters&) = delete;
  ~PassRegisters() {
    if (rows_ > 0) _tile_release();
  }

  /// Configures them for `rows` rows, of each of which a step takes `groups` groups, and for
  /// `columns` features in a register.
  void set_shape(int64_t rows, int groups, int columns = kTileRows) {
    if (rows == rows_ && groups == groups_ && columns == columns_) return;
    rows_ = rows;
    groups_ = groups;
    columns_ = columns;
    const TileConfig config(rows, groups, columns);
    settle_memory();
    _tile_loadconfig(&config);
  }

  void set_rows(int64_t rows) { set_shape(rows, kTileRows); }

 private:
  int64_t rows_ = 0;
  int groups_ = 0, columns_ = 0;
};

}  // namespace mtpc
