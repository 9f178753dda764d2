// One split of one unit: scores, weights, weighted values.
//
// While scores are taken the split's values are fetched, and while values are added the next split's
// keys. So memory is never idle.
#pragma once

#include <algorithm>
#include <memory>

#include "attention_pairs.h"
#include "attention_tiles.h"
#if defined(__AMX_TILE__)
#include "attention_amx.h"
#endif

namespace mtpc {

/// Whether this level can add up values of such caches in tile registers (attention_amx.h).
template <class A, class T>
inline constexpr bool kTileRegisters =
#if defined(__AMX_TILE__)
    kPairs<A, T>;
#else
    false;
#endif

/// Positions whose values stay in the first-level cache for all rows of a head.
inline constexpr int64_t kValues = 64;

/// Unnormalised results of a unit's rows over some positions.
template <class A>
struct Partial {
  A* sums;         // [rows, stride]
  Norm<A>* norms;  // [rows]
};

/// Memory of one thread, kept between calls. On the heap, because addresses of thread-local
/// objects would be looked up again in the innermost loops.
template <class A, class T>
struct Scratch {
  Buffer<A> queries, panel, weights, split_sums, unit_sums;
  Buffer<T> narrow_queries, high_weights, low_weights;
  Buffer<Group> packed;
  Norm<A> split_norms[kRows], unit_norms[kRows];
  const T* keys[kSplit];
  const T* values[kSplit];
  const T* next_keys[kSplit];

  static Scratch& of_this_thread() {
    static thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
    return *scratch;
  }
};

/// Attention of a unit's rows to the positions of a split.
template <class A, class T>
class SplitAttention {
 public:
  using Memory = Scratch<A, T>;

  explicit SplitAttention(const Problem& problem)
      : stride((problem.values.width + kPanel<A> - 1) / kPanel<A> * kPanel<A>),
        p_(problem),
        keys_(static_cast<const T*>(problem.keys.tensor.const_data_ptr())),
        values_(static_cast<const T*>(problem.values.tensor.const_data_ptr())) {}

  /// Elements of a row of sums: whole panels.
  const int64_t stride;

  int64_t token(const Unit& unit, int64_t row) const {
    return unit.token + (unit.first + row % unit.rows) / p_.groups();
  }

  int64_t position(const Unit& unit, int64_t row) const {
    return unit.position + (unit.first + row % unit.rows) / p_.groups();
  }

  int64_t head(const Unit& unit, int64_t row) const {
    const int64_t kv_head = unit.kv_head + row / unit.rows;
    return kv_head * p_.groups() + (unit.first + row % unit.rows) % p_.groups();
  }

  /// The unit's queries: as they are for pairs, else in the accumulation type.
  void load_queries(const Unit& unit, Memory& memory) const {
    const int64_t width = p_.keys.width, rows = unit.all_rows();
    T* narrow = memory.narrow_queries.reserve(kRows * width);
    A* wide = memory.queries.reserve(kRows * width);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = token(unit, row) * p_.q.stride(0) + head(unit, row) * p_.q.stride(1);
      if (in_pairs()) {
        const T* query = static_cast<const T*>(p_.q.const_data_ptr()) + at;
        std::copy(query, query + width, narrow + row * width);
      } else {
        read(wide + row * width, p_.q, at, width);
      }
    }
  }

  /// Scores, weights and weighted values of one split, with the queries that are loaded.
  void attend(const Unit& unit, int64_t split, Memory& memory, Partial<A> out) const {
    const int64_t base = split * kSplit;
    const Range seen = intersect(unit.visible, {base, base + kSplit});
    const Range local{seen.begin - base, seen.end - base};
    find_rows(unit, base, local, memory);
    A* weights = memory.weights.reserve(kRows * kSplit);
    const Range computed = score(unit, local, memory, weights);
    for (int64_t row = 0; row < unit.all_rows(); ++row) {
      const Range own = intersect(p_.visible(position(unit, row)), seen);
      out.norms[row] = weigh_row<A>(
          weights + row * kSplit, computed, {own.begin - base, own.end - base},
          static_cast<A>(p_.scale), static_cast<A>(p_.softcap));
    }
    if constexpr (kTileRegisters<A, T>) {
      if (in_pairs()) return add_packed_values(unit, computed, local, memory, out);
    }
    add_values_by_panel(unit, local, memory, out);
  }

  /// Brings the dimensions of a row of sums into their order, when nothing is added to it any more.
  void order(A* sums) const {
    if constexpr (kPairs<A, T>) {
      if (!kTileRegisters<A, T> || !in_pairs()) order_dimensions(sums, stride);
    }
  }

 private:
  /// Whether products are taken of pairs of bfloat16.
  bool in_pairs() const {
    return kPairs<A, T> && p_.q.scalar_type() == ScalarType::BFloat16 && p_.keys.width % 2 == 0;
  }

  /// rows[j] = where the first head's row of position base + j lies, for the positions of `local`.
  void place(const Unit& unit, const Cache& cache, const T* first, int64_t base, Range local,
             const T** rows) const {
    for (int64_t j = local.begin; j < local.end;) {
      const int64_t slot = (base + j) % cache.page_size;
      const int64_t end = std::min(local.end, j + cache.page_size - slot);
      const T* row = first + p_.page(unit.request, base + j) * cache.page_stride +
                     slot * cache.slot_stride + unit.kv_head * cache.head_stride;
      for (; j < end; ++j, row += cache.slot_stride) rows[j] = row;
    }
  }

  /// Where keys and values of a split lie; null for positions that no row of the unit sees. And the
  /// keys of the next split, or any where there are none.
  void find_rows(const Unit& unit, int64_t base, Range local, Memory& memory) const {
    std::fill_n(memory.keys, kSplit, nullptr);
    place(unit, p_.keys, keys_, base, local, memory.keys);
    place(unit, p_.values, values_, base, local, memory.values);
    if constexpr (kPairs<A, T>) {
      const Range next = intersect({0, kSplit}, {0, unit.visible.end - base - kSplit});
      place(unit, p_.keys, keys_, base + kSplit, next, memory.next_keys);
      std::copy(memory.keys + next.size(), memory.keys + kSplit, memory.next_keys + next.size());
    }
  }

  /// Scores of all rows, panel by panel; returns the positions that the panels cover.
  Range score(const Unit& unit, Range local, Memory& memory, A* scores) const {
    const Range computed{
        local.begin / kPanel<A> * kPanel<A>,
        (local.end + kPanel<A> - 1) / kPanel<A> * kPanel<A>};
    for (int64_t j = computed.begin; j < computed.end; j += kPanel<A>) {
      const bool whole = panel_at(j, local).size() == kPanel<A>;
      for (int64_t h = 0; h < unit.heads; ++h) score_panel_of(unit, h, memory, j, whole, scores + j);
    }
    return computed;
  }

  /// The scores of one panel of one head.
  void score_panel_of(const Unit& unit, int64_t h, Memory& memory, int64_t begin, bool whole,
                      A* scores) const {
    const T* const* keys = memory.keys + begin;
    const int64_t width = p_.keys.width, shift = h * p_.keys.head_stride;
    scores += h * unit.rows * kSplit;
    if constexpr (kPairs<A, T>) {
      if (in_pairs()) {
        const T* queries = memory.narrow_queries.get() + h * unit.rows * width;
        Group* packed = memory.packed.reserve(kSplit / 2 * kFeatures + width / 2 * kFeatures);
        const Ahead ahead{memory.values + begin, h * p_.values.head_stride};
        pack_keys(keys, whole, shift, width, ahead, packed);
#if defined(__AMX_TILE__)
        score_panel(queries, unit.rows, width, packed, scores);
#else
        for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
          score_pairs<decltype(tile)::value>(
              queries + row * width, width, packed, scores + row * kSplit);
        });
#endif
        return;
      }
    }
    const A* queries = memory.queries.get() + h * unit.rows * width;
    A* panel = memory.panel.reserve(width * kPanel<A>);
    pack_panel<A>(keys, shift, width, panel);
    for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
      score_tile<decltype(tile)::value>(
          queries + row * width, width, panel, scores + row * kSplit);
    });
  }

  /// Weighted values, a panel of all heads at a time.
  void add_values_by_panel(const Unit& unit, Range local, Memory& memory, Partial<A> out) const {
    std::fill_n(out.sums, unit.all_rows() * stride, A(0));
    const A* weights = memory.weights.get();
    for (int64_t j = local.begin; j < local.end; j += kValues) {
      const Range panel = intersect({j, j + kValues}, local);
      for (int64_t h = 0; h < unit.heads; ++h) {
        for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
          constexpr int kTile = decltype(tile)::value;
          const int64_t shift = h * p_.values.head_stride;
          const A* from = weights + (h * unit.rows + row) * kSplit;
          A* to = out.sums + (h * unit.rows + row) * stride;
          if constexpr (kPairs<A, T>) {
            const Ahead ahead{row == 0 ? memory.next_keys : nullptr, h * p_.keys.head_stride};
            value_row_blocks<kTile>(
                from, memory.values, shift, panel, p_.values.width, ahead, to, stride);
          } else {
            value_row_tile<kTile>(from, memory.values, shift, panel, p_.values.width, to, stride);
          }
        });
      }
    }
  }

  /// Weighted values in tile registers, 32 dimensions at a time.
  void add_packed_values(const Unit& unit, Range computed, Range local, Memory& memory,
                         Partial<A> out) const {
    T* high = memory.high_weights.reserve(kRows * kSplit);
    T* low = memory.low_weights.reserve(kRows * kSplit);
    for (int64_t row = 0; row < unit.all_rows(); ++row) {
      const int64_t at = row * kSplit;
      split_weights(memory.weights.get() + at, computed, high + at, low + at);
    }
    const int64_t width = p_.values.width;
    Group* tile = memory.packed.reserve(kSplit / 2 * kFeatures);
    for (int64_t h = 0; h < unit.heads; ++h) {
      const int64_t first = h * unit.rows;
      for (int64_t column = 0; column < width; column += kFeatures) {
        pack_values(memory.values, computed, local, h * p_.values.head_stride + column,
                    width - column, tile);
        add_values(high + first * kSplit, low + first * kSplit, unit.rows, computed, tile,
                   out.sums + first * stride + column, stride);
      }
    }
  }

  static Range panel_at(int64_t begin, Range local) {
    return intersect({begin, begin + kPanel<A>}, local);
  }

  const Problem& p_;
  const T* keys_;
  const T* values_;
};

}  // namespace mtpc
