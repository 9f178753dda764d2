// Attention to keys by request slot, see mtpc/ops/slot_attention.py.
//
// A task is a row and some of its heads, which share the keys. The keys that the row sees are listed
// first, by position: those of the ring, then the forward's own, then entries. Sums run along this
// list. So they follow from the row's position alone, whatever rows there are beside it, and whether
// a key comes from the ring or from the forward.
#include <optional>

#include "attention_rows.h"
#include "operators.h"

namespace mtpc {
namespace {

/// Keys by request slot, [slots, places, D].
struct SlotKeys {
  explicit SlotKeys(const Tensor& t)
      : tensor(adjacent_last(t)),
        slots(t.size(0)),
        places(t.size(1)),
        slot_stride(tensor.stride(0)),
        stride(tensor.stride(1)) {}

  /// Where a key lies. Slots are clamped: memory stays safe.
  int64_t offset(int64_t slot, int64_t place) const {
    return std::clamp<int64_t>(slot, 0, slots - 1) * slot_stride + place * stride;
  }

  Tensor tensor;
  int64_t slots, places, slot_stride, stride;
};

/// Flags by row, [T, n].
struct Flags {
  explicit Flags(const Tensor& t)
      : tensor(as_dense(t)),
        data(static_cast<const bool*>(tensor.const_data_ptr())),
        stride(t.size(1)) {}

  const bool* row(int64_t token) const { return data + token * stride; }

  Tensor tensor;
  const bool* data;
  int64_t stride;
};

/// Everything about a call except the elements of its keys.
struct SlotCall {
  Queries q;
  Tensor fresh;
  SlotKeys ring;
  Indices row_slots;
  Flags sees_ring, sees_fresh;
  Tensor sinks;
  double scale;
  int64_t window;
  std::optional<SlotKeys> entries;
  std::optional<Indices> counts, chosen;
  int64_t choices;

  /// How many entries a row sees.
  int64_t count_entries(int64_t token) const {
    if (!entries) return 0;
    return std::clamp<int64_t>((*counts)(token), 0, chosen ? choices : entries->places);
  }

  /// No row sees more keys of the ring and the forward than this.
  int64_t most_of_window() const { return ring.places + std::min(window, q.tokens); }
};

/// The place of the oldest key in a ring, with which the run of seen places begins. Of a ring that is
/// all seen it cannot be told: the first place.
int64_t first_seen(const bool* seen, int64_t places) {
  for (int64_t place = 0; place < places; ++place) {
    if (seen[place] && !seen[(place + places - 1) % places]) return place;
  }
  return 0;
}

template <class A, class T>
class SlotAttention {
 public:
  SlotAttention(const SlotCall& call, const Tensor& out)
      : c_(call),
        out_(out),
        stride_((call.q.width + kPanel<A> - 1) / kPanel<A> * kPanel<A>),
        in_pairs_(
            kPairs<A, T> && call.q.type == ScalarType::BFloat16 && call.q.width % 2 == 0) {}

  void run() const {
    int64_t keys = 0;
    for (int64_t t = 0; t < c_.q.tokens; ++t) keys += c_.most_of_window() + c_.count_entries(t);
    const int64_t workers = worker_count(2 * keys * c_.q.heads * c_.q.width);
    const int64_t heads = heads_together(workers);
    const int64_t parts = count_parts(heads);
    run_tasks(c_.q.tokens * parts, workers, [&](int64_t task) {
      const int64_t head = task % parts * heads;
      attend(task / parts, head, std::min(heads, c_.q.heads - head));
    });
  }

 private:
  /// Memory of one thread, kept between calls.
  struct Memory {
    Buffer<const T*> keys;
    Buffer<A> queries, panel, weights, sums, split_sums;
    Buffer<T> narrow_queries, narrow_weights;
    Buffer<Group> packed;
    Norm<A> norms[kRows], split_norms[kRows];

    static Memory& of_this_thread() {
      static thread_local const std::unique_ptr<Memory> memory = std::make_unique<Memory>();
      return *memory;
    }
  };

  /// Whether values are added up by pairs of keys.
  bool adds_pairs() const { return kValuePairs<A, T> && in_pairs_; }

  /// How many tasks share a row's keys, each with so many heads.
  int64_t count_parts(int64_t heads) const { return (c_.q.heads + heads - 1) / heads; }

  /// How many heads a task has: as many as share the keys in a cache, but fewer where threads would
  /// have unequal work.
  int64_t heads_together(int64_t workers) const {
    constexpr int64_t kLeast = 8;
    const auto suffice = [&](int64_t heads) {
      const int64_t tasks = c_.q.tokens * count_parts(heads);
      return tasks % workers == 0 || tasks >= 4 * workers;
    };
    int64_t heads = std::min(c_.q.heads, kRows);
    while (heads > kLeast && !suffice(heads)) heads = (heads + 1) / 2;
    return heads;
  }

  void attend(int64_t token, int64_t head, int64_t heads) const {
    Memory& memory = Memory::of_this_thread();
    const int64_t count = list_keys(token, memory);
    if (count == 0) return;
    load_queries(token, head, heads, memory);
    A* sums = memory.sums.reserve(kRows * stride_);
    attend_split(heads, 0, std::min(count, kSplit), memory, sums, memory.norms);
    A* more = memory.split_sums.reserve(kRows * stride_);
    for (int64_t base = kSplit; base < count; base += kSplit) {
      attend_split(
          heads, base, std::min(count - base, kSplit), memory, more, memory.split_norms);
      for (int64_t h = 0; h < heads; ++h) {
        absorb(sums + h * stride_, memory.norms[h], more + h * stride_, memory.split_norms[h],
               stride_);
      }
    }
    finish(token, head, heads, memory);
  }

  /// Lists the keys that a row sees, and the last again to fill a panel; returns how many it sees.
  int64_t list_keys(int64_t token, Memory& memory) const {
    const int64_t most = c_.most_of_window() + c_.count_entries(token);
    const T** keys = memory.keys.reserve(most + kPanel<A>);
    const T** end = list_entries(token, list_window(token, keys));
    const int64_t count = end - keys;
    if (count > 0) std::fill_n(end, kPanel<A>, end[-1]);
    return count;
  }

  /// The keys of the ring and of the forward, the oldest first.
  const T** list_window(int64_t token, const T** to) const {
    const T* ring = static_cast<const T*>(c_.ring.tensor.const_data_ptr());
    const T* fresh = static_cast<const T*>(c_.fresh.const_data_ptr());
    const int64_t places = c_.ring.places, slot = c_.row_slots(token);
    const bool* held = c_.sees_ring.row(token);
    const int64_t first = first_seen(held, places);
    for (int64_t i = 0; i < places; ++i) {
      const int64_t place = first + i < places ? first + i : first + i - places;
      if (held[place]) *to++ = ring + c_.ring.offset(slot, place);
    }
    const bool* own = c_.sees_fresh.row(token);
    for (int64_t row = std::max<int64_t>(token - c_.window + 1, 0); row <= token; ++row) {
      if (own[row]) *to++ = fresh + row * c_.fresh.stride(0);
    }
    return to;
  }

  const T** list_entries(int64_t token, const T** to) const {
    if (!c_.entries) return to;
    const SlotKeys& entries = *c_.entries;
    const T* first = static_cast<const T*>(entries.tensor.const_data_ptr());
    const int64_t count = c_.count_entries(token), all = entries.slots * entries.places;
    if (!c_.chosen) {
      const T* row = first + entries.offset(c_.row_slots(token), 0);
      for (int64_t i = 0; i < count; ++i, row += entries.stride) *to++ = row;
      return to;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t entry = std::clamp<int64_t>((*c_.chosen)(token, i), 0, all - 1);
      *to++ = first + entries.offset(entry / entries.places, entry % entries.places);
    }
    return to;
  }

  /// A task's queries: as they are for pairs, else in the accumulation type.
  void load_queries(int64_t token, int64_t head, int64_t heads, Memory& memory) const {
    const int64_t width = c_.q.width;
    T* narrow = memory.narrow_queries.reserve(in_pairs_ ? kRows * width : 0);
    A* wide = memory.queries.reserve(in_pairs_ ? 0 : kRows * width);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = c_.q.offset(token, head + h);
      if (in_pairs_) {
        const T* query = static_cast<const T*>(c_.q.data) + at;
        std::copy(query, query + width, narrow + h * width);
      } else {
        read(wide + h * width, c_.q.tensor, at, width);
      }
    }
  }

  /// Scores, weights and weighted values of the keys from `base` on.
  void attend_split(int64_t heads, int64_t base, int64_t count, Memory& memory, A* sums,
                    Norm<A>* norms) const {
    const T* const* keys = memory.keys.get() + base;
    A* weights = memory.weights.reserve(kRows * kSplit);
    T* narrow = memory.narrow_weights.reserve(adds_pairs() ? kRows * kSplit : 0);
    const int64_t scored = (count + kPanel<A> - 1) / kPanel<A> * kPanel<A>;
    for (int64_t j = 0; j < scored; j += kPanel<A>) score(heads, keys + j, memory, weights + j);
    LinesAhead none{nullptr, 0, 0};
    for (int64_t h = 0; h < heads; ++h) {
      norms[h] = weigh<T>(adds_pairs(), weights + h * kSplit, narrow + h * kSplit, {0, scored},
                          {0, count}, static_cast<A>(c_.scale), A(0), {nullptr, nullptr}, none);
    }
    std::fill_n(sums, heads * stride_, A(0));
    // The last key's other half of a pair has no weight.
    const int64_t added = adds_pairs() ? (count + 1) / 2 * 2 : count;
    for_row_tiles(heads, [&](auto tile, int64_t h) {
      add_weighted<decltype(tile)::value>(
          adds_pairs(), weights + h * kSplit, narrow + h * kSplit, keys, 0, {0, added}, c_.q.width,
          nullptr, sums + h * stride_, stride_);
    });
  }

  /// The scores of one panel of keys.
  void score(int64_t heads, const T* const* keys, Memory& memory, A* scores) const {
    const int64_t width = c_.q.width;
    if constexpr (kPairs<A, T>) {
      if (in_pairs_) {
        Group* packed = memory.packed.reserve(width / 2 * kFeatures);
        LinesAhead none{nullptr, 0, 0};
        pack_keys(keys, true, 0, width, none, packed);
        return for_row_tiles(heads, [&](auto tile, int64_t h) {
          score_pairs<decltype(tile)::value, false>(
              memory.narrow_queries.get() + h * width, width, packed, nullptr,
              scores + h * kSplit);
        });
      }
    }
    A* panel = memory.panel.reserve(width * kPanel<A>);
    pack_panel<A>(keys, 0, width, panel);
    for_row_tiles(heads, [&](auto tile, int64_t h) {
      score_tile<decltype(tile)::value>(
          memory.queries.get() + h * width, width, panel, scores + h * kSplit);
    });
  }

  /// Normalises, with the sinks' share, and writes.
  void finish(int64_t token, int64_t head, int64_t heads, Memory& memory) const {
    for (int64_t h = 0; h < heads; ++h) {
      A sink, *sums = memory.sums.get() + h * stride_;
      read(&sink, c_.sinks, (head + h) * c_.sinks.stride(0), 1);
      Norm<A> norm = memory.norms[h];
      const A keep = add_sink(norm, sink);
      normalise(sums, norm, keep, stride_);
      order_sums<T>(adds_pairs(), sums, stride_);
      write(out_, (token * c_.q.heads + head + h) * c_.q.width, sums, c_.q.width);
    }
  }

  const SlotCall& c_;
  const Tensor& out_;
  const int64_t stride_;  // of sums: whole panels
  const bool in_pairs_;  // Whether products are taken of pairs of bfloat16.
};

void check(bool fits, const char* wanted) {
  STD_TORCH_CHECK(fits, "mtpc_cpu::slot_attention: expected ", wanted);
}

bool has_shape(const Tensor& t, std::initializer_list<int64_t> sizes) {
  if (t.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (t.size(dim++) != size) return false;
  }
  return true;
}

void check_keys(const Tensor& query, const Tensor& fresh, const Tensor& ring,
                const std::optional<Tensor>& entries) {
  check(query.dim() == 3 && query.size(1) > 0, "query [T, N, D] of one head or more");
  check(ring.dim() == 3 && ring.size(0) > 0, "ring [S, places, D] of one slot or more");
  const int64_t tokens = query.size(0), width = query.size(2);
  check(has_shape(fresh, {tokens, width}) && ring.size(2) == width,
        "fresh [T, D] and ring [S, places, D] for query [T, N, D]");
  check(fresh.scalar_type() == ring.scalar_type(), "fresh and ring of one dtype");
  if (!entries) return;
  check(entries->dim() == 3 && entries->size(0) == ring.size(0) && entries->size(2) == width,
        "entries [S, E, D] for ring [S, places, D]");
  check(entries->scalar_type() == ring.scalar_type(), "entries and ring of one dtype");
}

void check_rows(const Tensor& query, const Tensor& ring, const Tensor& row_slots,
                const Tensor& sees_ring, const Tensor& sees_fresh, const Tensor& sinks,
                int64_t window) {
  const int64_t tokens = query.size(0);
  check(has_shape(row_slots, {tokens}), "row_slots [T] for query [T, N, D]");
  check(sees_ring.scalar_type() == ScalarType::Bool &&
            has_shape(sees_ring, {tokens, ring.size(1)}),
        "bool sees_ring [T, places] for ring [S, places, D]");
  check(sees_fresh.scalar_type() == ScalarType::Bool && has_shape(sees_fresh, {tokens, tokens}),
        "bool sees_fresh [T, T] for query [T, N, D]");
  check(has_shape(sinks, {query.size(1)}), "sinks [N] for query [T, N, D]");
  check(window >= 1, "window >= 1");
}

void check_choice(int64_t tokens, const std::optional<Tensor>& entries,
                  const std::optional<Tensor>& counts, const std::optional<Tensor>& chosen) {
  check(entries.has_value() == counts.has_value(), "entries with entry_counts, or neither");
  check(entries || !chosen, "chosen_entries with entries only");
  check(!counts || has_shape(*counts, {tokens}), "entry_counts [T] for query [T, N, D]");
  check(!chosen || (chosen->dim() == 2 && chosen->size(0) == tokens),
        "chosen_entries [T, k] for query [T, N, D]");
}

std::optional<Indices> indices(const std::optional<Tensor>& t, const char* name, int64_t dim) {
  return t ? std::optional(Indices(*t, name, dim)) : std::nullopt;
}

}  // namespace

MTPC_OPERATOR Tensor slot_attention(
    const Tensor& query, const Tensor& fresh, const Tensor& ring, const Tensor& row_slots,
    const Tensor& sees_ring, const Tensor& sees_fresh, const Tensor& sinks, double scale,
    int64_t window, const std::optional<Tensor>& entries,
    const std::optional<Tensor>& entry_counts, const std::optional<Tensor>& chosen_entries) {
  check_keys(query, fresh, ring, entries);
  check_rows(query, ring, row_slots, sees_ring, sees_fresh, sinks, window);
  check_choice(query.size(0), entries, entry_counts, chosen_entries);
  // Without places there is no entry to see.
  const bool has_entries = entries && entries->size(1) > 0;
  const SlotCall call{
      Queries(adjacent_last(query)), adjacent_last(fresh), SlotKeys(ring),
      Indices(row_slots, "row_slots", 1), Flags(sees_ring), Flags(sees_fresh), sinks, scale, window,
      has_entries ? std::optional(SlotKeys(*entries)) : std::nullopt,
      indices(entry_counts, "entry_counts", 1), indices(chosen_entries, "chosen_entries", 2),
      chosen_entries ? chosen_entries->size(1) : 0};
  const Tensor out = dense_zeros(query, {query.size(0), query.size(1), query.size(2)});
  with_type(ring.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    if (query.scalar_type() == ScalarType::Double) {
      SlotAttention<double, T>(call, out).run();
    } else {
      SlotAttention<float, T>(call, out).run();
    }
  });
  return out;
}

}  // namespace mtpc
