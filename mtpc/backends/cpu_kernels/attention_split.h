// One split of one unit: scores, weights, weighted values.
//
// While a panel's scores are taken the next panel's keys are fetched, and while its values are added
// the next panel's values. After the last keys come the first values, and after the last values the
// next split's first keys. Between them, while scores become weights, the other values are fetched
// into the second-level cache. So memory is never idle.
#pragma once

#include <algorithm>
#include <memory>

#include "attention_rows.h"
#include "cache_codes.h"
#if defined(__AMX_TILE__)
#include "attention_amx.h"
#endif

namespace mtpc {

template <class T>
inline constexpr bool kCodes = std::is_same_v<T, Code>;

/// The type in which products take a cache's elements.
template <class T>
using Factor = std::conditional_t<kCodes<T>, BFloat16, T>;

/// Whether this level can add up values of such caches in tile registers (attention_amx.h).
template <class A, class T>
inline constexpr bool kTileRegisters =
#if defined(__AMX_TILE__)
    kPairs<A, T>;
#else
    false;
struct PassRegisters {};  // This level has no tile registers.
#endif

/// Positions whose values stay in the first-level cache for all rows of a head; where the next panel's
/// are fetched meanwhile, those of a panel.
template <class A, class T>
inline constexpr int64_t kValues = kPairs<A, T> && !kTileRegisters<A, T> ? kPanel<A> : 64;

/// Unnormalised results of a unit's rows for some positions.
template <class A>
struct Partial {
  A* sums;         // [rows, stride]
  Norm<A>* norms;  // [rows]
};

/// Keys or values of one head: row j begins at rows[j] + shift.
template <class F>
struct HeadRows {
  const F* const* rows;
  int64_t shift;
};

/// Memory of one thread, kept between calls. On the heap, because addresses of thread-local
/// objects would be looked up again in the innermost loops.
template <class A, class T>
struct Scratch {
  Buffer<A> queries, panel, weights, split_sums, unit_sums;
  Buffer<Factor<T>> narrow_queries, weight_parts, expanded;
  Buffer<Group> packed, packed_queries;
#if defined(__AMX_TILE__)
  Buffer<TileSums<kMostRows>> tile_sums;
#endif
  Norm<A> split_norms[kRows], unit_norms[kRows];
  const T* keys[kSplit];
  const T* values[kSplit];
  const T* next_keys[kSplit];
  Range next;  // of next_keys
  const Factor<T>* expanded_rows[kSplit];
  const float* key_scales[kSplit];
  const float* value_scales[kSplit];
  A key_scales_of_head[kSplit], value_scales_of_head[kSplit];

  static Scratch& of_this_thread() {
    static thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
    return *scratch;
  }
};

/// A split of a unit that is attended to after another; none where there is no unit.
struct Next {
  const Unit* unit;
  int64_t split;
};

/// Attention of a unit's rows to the positions of a split.
template <class A, class T>
class SplitAttention {
 public:
  using Memory = Scratch<A, T>;
  using F = Factor<T>;

  explicit SplitAttention(const Problem& problem)
      : stride((problem.values.width + kPanel<A> - 1) / kPanel<A> * kPanel<A>),
        p_(problem),
        in_pairs_(
            kPairs<A, F> && problem.q.type == ScalarType::BFloat16 &&
            problem.keys.width % 2 == 0),
        is_spread_(kCodes<T> && !holds_float8(problem.keys.tensor)),
        keys_(static_cast<const T*>(problem.keys.tensor.const_data_ptr())),
        values_(static_cast<const T*>(problem.values.tensor.const_data_ptr())) {
    if constexpr (kCodes<T>) {
      key_scales_ = static_cast<const float*>(problem.key_scales->tensor.const_data_ptr());
      value_scales_ = static_cast<const float*>(problem.value_scales->tensor.const_data_ptr());
    }
  }

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

  /// The unit's queries: as they are for pairs, else in the accumulation type; and as keys are
  /// spread.
  void load_queries(const Unit& unit, Memory& memory) const {
    const int64_t width = p_.keys.width, rows = unit.all_rows();
    F* narrow = memory.narrow_queries.reserve(kRows * width);
    A* wide = memory.queries.reserve(kRows * width);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = p_.q.offset(token(unit, row), head(unit, row));
      if (is_spread_) {
        A* query = wide + row * width;
        read(query, p_.q.tensor, at, width);
        unspread(query, width);
        if (in_pairs_) std::copy(query, query + width, narrow + row * width);
      } else if (in_pairs_) {
        const F* query = static_cast<const F*>(p_.q.data) + at;
        std::copy(query, query + width, narrow + row * width);
      } else {
        read(wide + row * width, p_.q.tensor, at, width);
      }
    }
    if constexpr (kTileRegisters<A, F>) {
      if (!scores_keys_in_place(unit)) return;
      const int64_t each = width / 2 * kFewRows;
      Group* packed = memory.packed_queries.reserve(unit.heads * each);
      for (int64_t h = 0; h < unit.heads; ++h) {
        pack_queries(narrow + h * unit.rows * width, unit.rows, width, packed + h * each);
      }
    }
  }

  /// Scores, weights and weighted values of one split, with the queries that are loaded. Meanwhile
  /// the keys of `next` are fetched.
  void attend(
      const Unit& unit, int64_t split, const Next& next, Memory& memory, Partial<A> out) const {
    const int64_t base = split * kSplit;
    const Range seen = intersect(unit.visible, {base, base + kSplit});
    const Range local{seen.begin - base, seen.end - base};
    find_rows(unit, base, local, memory);
    find_next(next, memory);
    A* weights = memory.weights.reserve(kRows * kSplit);
    PassRegisters registers;
    const Range computed = score(unit, local, memory, registers, weights);
    LinesAhead ahead =
        lines_of(unit, p_.values, memory.values, {first_panel(local).end, local.end});
    for (int64_t row = 0; row < unit.all_rows(); ++row) {
      const Range own = intersect(p_.visible(position(unit, row)), seen);
      const bool is_first = row % unit.rows == 0;
      if (kCodes<T> && is_first) find_scales(row / unit.rows, local, memory);
      out.norms[row] = weigh(row, computed, {own.begin - base, own.end - base}, memory, ahead);
      if constexpr (kTileRegisters<A, F>) {
        F* parts = memory.weight_parts.reserve(2 * kRows * kSplit);
        if (in_pairs_) split_weights(weights + row * kSplit, computed, parts + 2 * row * kSplit);
      }
    }
#if defined(__AMX_TILE__)
    if constexpr (kTileRegisters<A, F>) {
      if (in_pairs_) return add_packed_values(unit, computed, local, memory, registers, out);
    }
#endif
    add_values_by_panel(unit, local, memory, out);
  }

  /// Brings the dimensions of a row of sums into their order, when nothing is added to it any more;
  /// and back from what values are spread to.
  void order(A* sums) const {
    if (!kTileRegisters<A, F> || !in_pairs_) order_sums<F>(adds_value_pairs(), sums, stride);
    if (is_spread_) unspread(sums, p_.values.width);
  }

 private:
  /// Whether values are added up by pairs of keys, with weights rounded to bfloat16.
  bool adds_value_pairs() const { return kValuePairs<A, F> && in_pairs_; }

  /// Whether keys are taken as they lie in memory, 16 of which are then in one page.
  bool scores_keys_in_place(const Unit& unit) const {
    if constexpr (!kTileRegisters<A, F>) return false;
    return in_pairs_ && unit.rows <= kFewRows && p_.keys.width % kFeatures == 0 &&
           (kCodes<T> || p_.keys.page_size % kFewRows == 0);
  }

  /// rows[j] = where the first head's row of position base + j lies, for the positions of `local`.
  template <class E>
  void place(const Unit& unit, const Cache& cache, const E* first, int64_t base, Range local,
             const E** rows) const {
    const int64_t from = base + local.begin;
    int64_t page = from / cache.page_size, slot = from % cache.page_size;
    for (int64_t j = local.begin; j < local.end; ++page, slot = 0) {
      const int64_t end = std::min(local.end, j + cache.page_size - slot);
      const E* row = first + p_.page(unit.request, page) * cache.page_stride +
                     slot * cache.slot_stride + unit.kv_head * cache.head_stride;
      for (; j < end; ++j, row += cache.slot_stride) rows[j] = row;
    }
  }

  /// Finds where keys and values of a split lie. Keys are null at positions of its panels that no row
  /// of the unit sees.
  void find_rows(const Unit& unit, int64_t base, Range local, Memory& memory) const {
    const Range panels = whole_panels(local);
    std::fill(memory.keys + panels.begin, memory.keys + local.begin, nullptr);
    std::fill(memory.keys + local.end, memory.keys + panels.end, nullptr);
    place(unit, p_.keys, keys_, base, local, memory.keys);
    place(unit, p_.values, values_, base, local, memory.values);
    if (adds_value_pairs()) {  // Weights of what no row sees are zeros.
      const Range pairs = whole_pairs(local);
      memory.values[pairs.begin] = memory.values[local.begin];
      memory.values[pairs.end - 1] = memory.values[local.end - 1];
    }
    if constexpr (kCodes<T>) {
      place(unit, *p_.key_scales, key_scales_, base, local, memory.key_scales);
      place(unit, *p_.value_scales, value_scales_, base, local, memory.value_scales);
    }
  }

  /// Finds the keys of a split that comes after this one, to fetch them. While codes expand, a row is
  /// fetched with each: where there are fewer, this split's.
  void find_next(const Next& next, Memory& memory) const {
    if constexpr (kPairs<A, F>) {
      const int64_t base = next.split * kSplit;
      const Range seen = next.unit ? intersect(next.unit->visible, {base, base + kSplit}) : Range{};
      memory.next = {seen.begin - base, seen.end - base};
      if (next.unit) place(*next.unit, p_.keys, keys_, base, memory.next, memory.next_keys);
      if (!kCodes<T>) return;
      std::copy(memory.keys, memory.keys + memory.next.begin, memory.next_keys);
      std::copy(memory.keys + memory.next.end, memory.keys + kSplit,
                memory.next_keys + memory.next.end);
    }
  }

  /// The scales of one head, zeros where no row of the unit sees.
  void find_scales(int64_t h, Range local, Memory& memory) const {
    const auto find = [&](const Cache& cache, const float* const* scales, A* to) {
      std::fill_n(to, kSplit, A(0));
      const int64_t shift = h * cache.head_stride;
      for (int64_t j = local.begin; j < local.end; ++j) to[j] = scales[j][shift];
    };
    find(*p_.key_scales, memory.key_scales, memory.key_scales_of_head);
    find(*p_.value_scales, memory.value_scales, memory.value_scales_of_head);
  }

  static Scales<A> scales(const Memory& memory) {
    if constexpr (!kCodes<T>) return {};
    return {memory.key_scales_of_head, memory.value_scales_of_head};
  }

  /// Keys or values of a head at some positions, as products take them. While codes are expanded,
  /// rows of `ahead` are fetched.
  HeadRows<F> head_rows(const Cache& cache, const T* const* rows, int64_t h, Range at,
                        const Cache& next, const T* const* ahead, Memory& memory) const {
    const int64_t shift = h * cache.head_stride;
    if constexpr (kCodes<T>) {
      F* to = memory.expanded.reserve(kSplit * cache.width);
      const auto expand = holds_float8(cache.tensor) ? expand_rows<true> : expand_rows<false>;
      expand(rows, shift, at.begin, at.end, cache.width,
             {ahead, h * next.head_stride, next.width}, to, memory.expanded_rows);
      return {memory.expanded_rows, 0};
    } else {
      return {rows, shift};
    }
  }

  /// The weights of one row, from its scores. Meanwhile `lines` are fetched.
  Norm<A> weigh(int64_t row, Range computed, Range own, Memory& memory, LinesAhead& lines) const {
    F* narrow = nullptr;
    if (adds_value_pairs()) narrow = memory.weight_parts.reserve(kRows * kSplit) + row * kSplit;
    return mtpc::weigh(adds_value_pairs(), memory.weights.get() + row * kSplit, narrow, computed, own,
                       static_cast<A>(p_.scale), static_cast<A>(p_.softcap), scales(memory), lines);
  }

  /// Scores of all rows, panel by panel; returns the positions that the panels cover.
  Range score(const Unit& unit, Range local, Memory& memory, PassRegisters& registers,
              A* scores) const {
    const Range computed = whole_panels(local);
#if defined(__AMX_TILE__)
    if constexpr (kTileRegisters<A, F>) {
      if (scores_keys_in_place(unit)) {
        const Range whole{
            (local.begin + kPanel<A> - 1) / kPanel<A> * kPanel<A>,
            local.end / kPanel<A> * kPanel<A>};
        LinesAhead ahead = lines_of(unit, p_.values, memory.values, whole);
        for (int64_t j = whole.begin; j < whole.end; j += kPanel<A>) {
          for (int64_t h = 0; h < unit.heads; ++h) {
            score_in_place(unit, h, memory, registers, {j, j + kPanel<A>}, ahead, scores);
          }
        }
      }
    }
#endif
    const Range values = first_panel(local);
    for (int64_t j = computed.begin; j < computed.end; j += kPanel<A>) {
      const bool whole = panel_at(j, local).size() == kPanel<A>;
      if (whole && scores_keys_in_place(unit)) continue;
      const Range next = panel_at(j + kPanel<A>, local);
      LinesAhead ahead = next.empty() ? lines_of(unit, p_.values, memory.values, values)
                                      : lines_of(unit, p_.keys, memory.keys, next);
      for (int64_t h = 0; h < unit.heads; ++h) {
        score_panel_of(unit, h, memory, registers, j, whole, ahead, scores + j);
      }
    }
    return computed;
  }

  /// Lines of all heads of the unit at some positions; none where products do not fetch them. Those of
  /// codes are fetched as they expand.
  LinesAhead lines_of(const Unit& unit, const Cache& cache, const T* const* rows, Range at) const {
    if constexpr (kPairs<A, T>) {
      return {rows + at.begin, at.size(), unit.heads * cache.width};
    } else {
      return {nullptr, 0, 0};
    }
  }

#if defined(__AMX_TILE__)
  /// The scores of one head's few rows at the positions of `range`, of whole panels.
  void score_in_place(const Unit& unit, int64_t h, Memory& memory, PassRegisters& registers,
                      Range range, LinesAhead& ahead, A* scores) const {
    const auto [keys, shift] = head_rows(
        p_.keys, memory.keys, h, range, p_.values, memory.values, memory);
    const int64_t width = p_.keys.width;
    const int64_t stride = kCodes<T> ? width : p_.keys.slot_stride;
    score_keys(
        registers, memory.packed_queries.get() + h * (width / 2) * kFewRows, unit.rows, width, keys,
        shift, stride, range, ahead, memory.panel.reserve(kSplit * kFewRows),
        scores + h * unit.rows * kSplit);
  }
#endif

  /// The scores of one panel of one head.
  void score_panel_of(const Unit& unit, int64_t h, Memory& memory, PassRegisters& registers,
                      int64_t begin, bool whole, LinesAhead& ahead, A* scores) const {
    const auto [rows, shift] = head_rows(
        p_.keys, memory.keys, h, {begin, begin + kPanel<A>}, p_.values, memory.values, memory);
    const F* const* keys = rows + begin;
    const int64_t width = p_.keys.width;
    scores += h * unit.rows * kSplit;
    if constexpr (kPairs<A, F>) {
      if (in_pairs_) {
        const F* queries = memory.narrow_queries.get() + h * unit.rows * width;
        Group* packed = memory.packed.reserve(kSplit / 2 * kFeatures + width / 2 * kFeatures);
        pack_keys(keys, whole, shift, width, ahead, packed);
#if defined(__AMX_TILE__)
        score_panel(registers, queries, unit.rows, width, packed, scores);
#else
        for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
          const auto score = [&](auto fetches) {
            score_pairs<decltype(tile)::value, decltype(fetches)::value>(
                queries + row * width, width, packed, &ahead, scores + row * kSplit);
          };
          if (row > 0) return score(std::false_type{});
          score(std::true_type{});
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
    const bool by_pairs = adds_value_pairs();
    const Range all = by_pairs ? whole_pairs(local) : local;
    constexpr int64_t kStep = kValues<A, T>;
    for (int64_t j = all.begin / kStep * kStep; j < all.end; j += kStep) {
      const Range panel = intersect({j, j + kStep}, all);
      const Range next = intersect({j + kStep, j + 2 * kStep}, all);
      LinesAhead ahead = next.empty()
          ? lines_of(unit, p_.keys, memory.next_keys, first_panel(memory.next))
          : lines_of(unit, p_.values, memory.values, next);
      for (int64_t h = 0; h < unit.heads; ++h) {
        const auto [values, shift] = head_rows(
            p_.values, memory.values, h, panel, p_.keys,
            kPairs<A, F> ? memory.next_keys : memory.values, memory);
        for_row_tiles(unit.rows, [&, values = values, shift = shift](auto tile, int64_t row) {
          const int64_t at = (h * unit.rows + row) * kSplit;
          LinesAhead* with = row == 0 && !kCodes<T> ? &ahead : nullptr;
          add_weighted<decltype(tile)::value>(
              by_pairs, weights + at, by_pairs ? memory.weight_parts.get() + at : nullptr, values,
              shift, panel, p_.values.width, with, out.sums + (h * unit.rows + row) * stride,
              stride);
        });
      }
    }
  }

#if defined(__AMX_TILE__)
  /// Weighted values in tile registers, 32 dimensions at a time.
  void add_packed_values(const Unit& unit, Range computed, Range local, Memory& memory,
                         PassRegisters& registers, Partial<A> out) const {
    if (unit.rows <= kFewRows) {
      return add_values_in_order(unit, computed, local, memory, registers, out);
    }
    const F* parts = memory.weight_parts.get();
    const int64_t width = p_.values.width;
    Group* tile = memory.packed.reserve(kSplit / 2 * kFeatures);
    LinesAhead ahead = lines_of(unit, p_.keys, memory.next_keys, {});
    for (int64_t h = 0; h < unit.heads; ++h) {
      const int64_t first = h * unit.rows;
      const auto [values, shift] = head_rows(
          p_.values, memory.values, h, local, p_.keys, memory.next_keys, memory);
      for (int64_t column = 0; column < width; column += kFeatures) {
        pack_values(values, computed, local, shift + column, width - column, ahead, tile);
        add_values(registers, parts + 2 * first * kSplit, unit.rows, computed, tile,
                   out.sums + first * stride + column, stride);
      }
    }
  }

  /// The same of few rows, which wait for memory: it is read in order, some positions of all heads at
  /// a time. Sums of heads that are not at work are in memory.
  void add_values_in_order(const Unit& unit, Range computed, Range local, Memory& memory,
                           PassRegisters& registers, Partial<A> out) const {
    const int64_t width = p_.values.width, rows = 2 * unit.rows;
    const int64_t columns = (width + kFeatures - 1) / kFeatures;
    constexpr int64_t kStep = kValues<A, T>;
    Group* tile = memory.packed.reserve(kStep / 2 * kFeatures);
    TileSums<kMostRows>* sums = memory.tile_sums.reserve(unit.heads * columns);
    LinesAhead ahead = lines_of(unit, p_.keys, memory.next_keys, memory.next);
    for (int64_t j = computed.begin; j < computed.end; j += kStep) {
      const Range part = intersect({j, j + kStep}, computed);
      for (int64_t h = 0; h < unit.heads; ++h) {
        const auto [values, shift] = head_rows(
            p_.values, memory.values, h, intersect(part, local), p_.keys, memory.next_keys, memory);
        const InputRows weights = dense_rows(memory.weight_parts.get(), kSplit)
                                      .from(h * rows, part.begin / 2, part.size() / 2);
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t column = c * kFeatures;
          pack_values(values, part, local, shift + column, width - column, ahead, tile);
          const bool begun = j > computed.begin;
          add_tile(weights, rows, tile, {}, begun, registers, sums[h * columns + c]);
        }
      }
    }
    for (int64_t h = 0; h < unit.heads; ++h) {
      for (int64_t c = 0; c < columns; ++c) {
        A* to = out.sums + h * unit.rows * stride + c * kFeatures;
        join_parts(sums[h * columns + c], unit.rows, to, stride);
      }
    }
  }
#endif

  static Range whole_pairs(Range local) {
    return {local.begin / 2 * 2, (local.end + 1) / 2 * 2};
  }

  static Range whole_panels(Range local) {
    return {local.begin / kPanel<A> * kPanel<A>,
            (local.end + kPanel<A> - 1) / kPanel<A> * kPanel<A>};
  }

  /// The positions that the first panel of a range has.
  static Range first_panel(Range local) { return panel_at(whole_panels(local).begin, local); }

  static Range panel_at(int64_t begin, Range local) {
    return intersect({begin, begin + kPanel<A>}, local);
  }

  const Problem& p_;
  const bool in_pairs_;  // Whether products are taken of pairs of bfloat16.
  const bool is_spread_;  // Whether codes are those of spread rows.
  const T* keys_;
  const T* values_;
  const float *key_scales_ = nullptr, *value_scales_ = nullptr;
};

}  // namespace mtpc
