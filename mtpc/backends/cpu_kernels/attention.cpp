// Paged attention: softmax(q K^T) V over pages, split by position and merged in order.
//
// A unit (rows of one request on one key/value head) is a left fold over its splits. When there
// are more units than threads each is folded by one thread; otherwise the splits are computed in
// parallel and folded afterwards. Both do the same arithmetic in the same order.
#include <optional>

#include "attention_plan.h"
#include "attention_tiles.h"
#include "product_rows.h"
#if defined(__AMX_TILE__)
#include "attention_amx.h"
#endif
#include "operators.h"

namespace mtpc {
namespace {

/// Whether this level can take the products of such caches in tile registers (attention_amx.h).
template <class A, class T>
inline constexpr bool kTileRegisters =
#if defined(__AMX_TILE__)
    std::is_same_v<A, float> && std::is_same_v<T, BFloat16>;
#else
    false;
#endif

/// Unnormalised results of a unit's rows over some positions.
template <class A>
struct Partial {
  A* sums;        // [rows, stride]
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

  static Scratch& of_this_thread() {
    static thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
    return *scratch;
  }
};

template <class A, class T>
class Attention {
 public:
  Attention(const Problem& problem, const Tensor& out)
      : p_(problem),
        out_(out),
        keys_(static_cast<const T*>(problem.keys.tensor.const_data_ptr())),
        values_(static_cast<const T*>(problem.values.tensor.const_data_ptr())),
        stride_((problem.values.width + kPanel<A> - 1) / kPanel<A> * kPanel<A>),
        units_(plan_units(problem)) {}

  void run() const {
    const int64_t units = units_.size();
    const int64_t workers = worker_count(count_work(p_, units_));
    const bool enough_units = workers == 1 || units >= 4 * workers;
    if (enough_units || most_splits() <= 1) {
      run_tasks(units, workers, [&](int64_t unit) { fold_unit(units_[unit]); });
    } else {
      run_split_parallel(workers);
    }
  }

 private:
  using Memory = Scratch<A, T>;

  int64_t most_splits() const {
    int64_t most = 0;
    for (const Unit& unit : units_) most = std::max(most, unit.splits().size());
    return most;
  }

  /// One unit from beginning to end on one thread.
  void fold_unit(const Unit& unit) const {
    Memory& memory = Memory::of_this_thread();
    const Partial<A> split{memory.split_sums.reserve(unit.rows * stride_), memory.split_norms};
    const Partial<A> total = empty_partial(unit);
    load_queries(unit, memory);
    const Range splits = unit.splits();
    for (int64_t s = splits.begin; s < splits.end; ++s) {
      attend(unit, s, memory, split);
      absorb(total, split, unit.rows);
    }
    finish(unit, total);
  }

  /// Splits of few units on all threads, then the folds.
  void run_split_parallel(int64_t workers) const {
    struct Task {
      const Unit* unit;
      int64_t split;
    };
    std::vector<Task> tasks;
    std::vector<int64_t> first_task;
    for (const Unit& unit : units_) {
      first_task.push_back(tasks.size());
      const Range splits = unit.splits();
      for (int64_t s = splits.begin; s < splits.end; ++s) tasks.push_back({&unit, s});
    }
    const int64_t rows = most_rows();
    const Buffer<A> sums(tasks.size() * rows * stride_);
    const Buffer<Norm<A>> norms(tasks.size() * rows);
    const auto partial = [&](int64_t task) {
      return Partial<A>{sums.get() + task * rows * stride_, norms.get() + task * rows};
    };
    run_tasks(tasks.size(), workers, [&](int64_t task) {
      Memory& memory = Memory::of_this_thread();
      load_queries(*tasks[task].unit, memory);
      attend(*tasks[task].unit, tasks[task].split, memory, partial(task));
    });
    run_tasks(units_.size(), workers, [&](int64_t i) {
      const Unit& unit = units_[i];
      const Partial<A> total = empty_partial(unit);
      for (int64_t s = 0; s < unit.splits().size(); ++s) {
        absorb(total, partial(first_task[i] + s), unit.rows);
      }
      finish(unit, total);
    });
  }

  int64_t most_rows() const {
    int64_t most = 0;
    for (const Unit& unit : units_) most = std::max(most, unit.rows);
    return most;
  }

  int64_t token(const Unit& unit, int64_t row) const {
    return unit.token + (unit.first + row) / p_.groups();
  }

  int64_t position(const Unit& unit, int64_t row) const {
    return unit.position + (unit.first + row) / p_.groups();
  }

  int64_t head(const Unit& unit, int64_t row) const {
    return unit.kv_head * p_.groups() + (unit.first + row) % p_.groups();
  }

  /// Whether products are taken in tile registers: they multiply pairs of bfloat16.
  bool in_tile_registers() const {
    return kTileRegisters<A, T> && p_.q.scalar_type() == ScalarType::BFloat16 &&
        p_.keys.width % 2 == 0;
  }

  /// The unit's queries: as they are for tile registers, else in the accumulation type, times the
  /// scale.
  void load_queries(const Unit& unit, Memory& memory) const {
    const int64_t width = p_.keys.width;
    if (in_tile_registers()) {
      T* queries = memory.narrow_queries.reserve(kRows * width);
      for (int64_t row = 0; row < unit.rows; ++row) {
        const T* query = static_cast<const T*>(p_.q.const_data_ptr()) + query_offset(unit, row);
        std::copy(query, query + width, queries + row * width);
      }
      return;
    }
    A* queries = memory.queries.reserve(kRows * width);
    for (int64_t row = 0; row < unit.rows; ++row) {
      A* query = queries + row * width;
      read(query, p_.q, query_offset(unit, row), width);
      for (int64_t d = 0; d < width; ++d) query[d] *= static_cast<A>(p_.scale);
    }
  }

  int64_t query_offset(const Unit& unit, int64_t row) const {
    return token(unit, row) * p_.q.stride(0) + head(unit, row) * p_.q.stride(1);
  }

  /// Where the keys and values of a split lie; null for positions that no row of the unit sees.
  void find_rows(const Unit& unit, int64_t base, Range local, Memory& memory) const {
    std::fill_n(memory.keys, kSplit, nullptr);
    for (int64_t j = local.begin; j < local.end;) {
      const int64_t page = p_.page(unit.request, base + j);
      const int64_t slot = (base + j) % p_.keys.page_size;
      const T* key = keys_ + offset_of(p_.keys, page, slot, unit.kv_head);
      const T* value = values_ + offset_of(p_.values, page, slot, unit.kv_head);
      const int64_t end = std::min(local.end, j + p_.keys.page_size - slot);
      for (; j < end; ++j, key += p_.keys.slot_stride, value += p_.values.slot_stride) {
        memory.keys[j] = key;
        memory.values[j] = value;
      }
    }
  }

  static int64_t offset_of(const Cache& cache, int64_t page, int64_t slot, int64_t head) {
    return page * cache.page_stride + slot * cache.slot_stride + head * cache.head_stride;
  }

  /// One split: scores, weights, weighted values.
  void attend(const Unit& unit, int64_t split, Memory& memory, Partial<A> out) const {
    const int64_t base = split * kSplit;
    const Range seen = intersect(unit.visible, {base, base + kSplit});
    const Range local{seen.begin - base, seen.end - base};
    find_rows(unit, base, local, memory);
    A* weights = memory.weights.reserve(kRows * kSplit);
    const Range computed = score(unit, local, memory, weights);
    for (int64_t row = 0; row < unit.rows; ++row) {
      const Range own = intersect(p_.visible(position(unit, row)), seen);
      out.norms[row] = weigh_row<A>(
          weights + row * kSplit, computed, {own.begin - base, own.end - base},
          static_cast<A>(p_.softcap));
    }
    if constexpr (kTileRegisters<A, T>) {
      if (in_tile_registers()) return add_packed_values(unit, computed, local, memory, out);
    }
    for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
      value_row_tile<decltype(tile)::value>(
          weights + row * kSplit, memory.values, local, p_.values.width,
          out.sums + row * stride_, stride_);
    });
  }

  /// Weighted values in tile registers, 32 dimensions at a time.
  void add_packed_values(const Unit& unit, Range computed, Range local, Memory& memory,
                         Partial<A> out) const {
    T* high = memory.high_weights.reserve(kRows * kSplit);
    T* low = memory.low_weights.reserve(kRows * kSplit);
    for (int64_t row = 0; row < unit.rows; ++row) {
      const int64_t at = row * kSplit;
      split_weights(memory.weights.get() + at, computed, high + at, low + at);
    }
    const int64_t width = p_.values.width;
    Group* tile = memory.packed.reserve(kSplit / 2 * kFeatures);
    for (int64_t column = 0; column < width; column += kFeatures) {
      pack_values(memory.values, computed, local, column, width - column, tile);
      add_values(high, low, unit.rows, computed, tile, out.sums + column, stride_);
    }
  }

  /// Scores of all rows, panel by panel; returns the positions that the panels cover.
  Range score(const Unit& unit, Range local, Memory& memory, A* scores) const {
    const int64_t width = p_.keys.width;
    A* panel = memory.panel.reserve(width * kPanel<A>);
    const Range computed{
        local.begin / kPanel<A> * kPanel<A>,
        (local.end + kPanel<A> - 1) / kPanel<A> * kPanel<A>};
    prefetch_rows(memory.keys, panel_at(computed.begin, local), width);
    for (int64_t j = computed.begin; j < computed.end; j += kPanel<A>) {
      prefetch_rows(memory.keys, panel_at(j + kPanel<A>, local), width);
      prefetch_rows(memory.values, panel_at(j, local), p_.values.width);
      if constexpr (kTileRegisters<A, T>) {
        if (in_tile_registers()) {
          score_packed_keys(unit, memory, memory.keys + j, scores + j);
          continue;
        }
      }
      pack_panel<A>(memory.keys + j, width, panel);
      for_row_tiles(unit.rows, [&](auto tile, int64_t row) {
        score_tile<decltype(tile)::value>(
            memory.queries.get() + row * width, width, panel, scores + row * kSplit + j);
      });
    }
    return computed;
  }

  /// The scores of one panel in tile registers.
  void score_packed_keys(const Unit& unit, Memory& memory, const T* const* keys, A* scores) const {
    const int64_t width = p_.keys.width;
    Group* packed = memory.packed.reserve(width / 2 * kFeatures);
    pack_keys(keys, width, packed);
    score_panel(memory.narrow_queries.get(), unit.rows, width, packed, static_cast<A>(p_.scale),
                scores);
  }

  static Range panel_at(int64_t begin, Range local) {
    return intersect({begin, begin + kPanel<A>}, local);
  }

  /// The fold's neutral element, in this thread's memory.
  Partial<A> empty_partial(const Unit& unit) const {
    Memory& memory = Memory::of_this_thread();
    A* sums = memory.unit_sums.reserve(unit.rows * stride_);
    std::fill_n(sums, unit.rows * stride_, A(0));
    std::fill_n(memory.unit_norms, unit.rows, Norm<A>{-kInfinity<A>, 0});
    return {sums, memory.unit_norms};
  }

  /// total += split, both rescaled to the larger peak. Exactly nothing changes for a row that
  /// sees nothing of the split: its factors are exp(0) and exp(-inf).
  void absorb(Partial<A> total, Partial<A> split, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      Norm<A>& norm = total.norms[row];
      const Norm<A> other = split.norms[row];
      const A peak = other.peak > norm.peak ? other.peak : norm.peak;
      const A keep = factor(norm.peak, peak);
      const A add = factor(other.peak, peak);
      A* sums = total.sums + row * stride_;
      const A* more = split.sums + row * stride_;
      for (int64_t d = 0; d < stride_; ++d) sums[d] = sums[d] * keep + more[d] * add;
      norm = {peak, norm.total * keep + other.total * add};
    }
  }

  static A factor(A peak, A new_peak) {
    return exp(Vec<A>{} + (peak - finite_peak(new_peak)))[0];
  }

  /// Normalises, with the sinks' share, and writes the rows of a unit.
  void finish(const Unit& unit, Partial<A> total) const {
    for (int64_t row = 0; row < unit.rows; ++row) {
      Norm<A> norm = total.norms[row];
      A keep = 1;
      if (p_.sinks) keep = add_sink(norm, head(unit, row));
      if (norm.total != 0) keep /= norm.total;
      A* sums = total.sums + row * stride_;
      for (int64_t d = 0; d < stride_; ++d) sums[d] *= keep;
      const int64_t width = p_.values.width;
      write(out_, (token(unit, row) * p_.heads() + head(unit, row)) * width, sums, width);
    }
  }

  /// A sink takes part in the normalisation only; returns the factor on the sums.
  A add_sink(Norm<A>& norm, int64_t head) const {
    A sink;
    read(&sink, *p_.sinks, head * p_.sinks->stride(0), 1);
    const A peak = sink > norm.peak ? sink : norm.peak;
    const A keep = factor(norm.peak, peak);
    norm = {peak, norm.total * keep + factor(sink, peak)};
    return keep;
  }

  const Problem& p_;
  const Tensor& out_;
  const T* keys_;
  const T* values_;
  int64_t stride_;
  std::vector<Unit> units_;
};

Cache paged_cache(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(
      tensor.dim() == 4, "mtpc_cpu::paged_attention: expected ", name, " [pages, P, H_kv, D]");
  const Tensor t = adjacent_last(tensor);
  return {t, t.size(0), t.size(1), t.size(2), t.size(3), t.stride(0), t.stride(1), t.stride(2)};
}

void check(const Problem& p) {
  STD_TORCH_CHECK(p.q.dim() == 3, "mtpc_cpu: expected q [T, N, D]");
  STD_TORCH_CHECK(
      p.q.size(2) == p.keys.width, "mtpc_cpu: q has width ", p.q.size(2), ", the keys have ",
      p.keys.width);
  STD_TORCH_CHECK(
      p.keys.heads > 0 && p.heads() % p.keys.heads == 0, "mtpc_cpu: ", p.heads(),
      " query heads are no multiple of ", p.keys.heads, " key/value heads");
  STD_TORCH_CHECK(
      p.values.pages == p.keys.pages && p.values.page_size == p.keys.page_size &&
          p.values.heads == p.keys.heads,
      "mtpc_cpu: key and value caches differ in pages, page size or heads");
  STD_TORCH_CHECK(
      p.keys.tensor.scalar_type() == p.values.tensor.scalar_type(),
      "mtpc_cpu: key and value caches differ in dtype");
}

Tensor attend(const Problem& problem) {
  check(problem);
  const Tensor out =
      dense_zeros(problem.q, {problem.tokens(), problem.heads(), problem.values.width});
  with_type(problem.keys.tensor.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    if (problem.q.scalar_type() == ScalarType::Double) {
      Attention<double, T>(problem, out).run();
    } else {
      Attention<float, T>(problem, out).run();
    }
  });
  return out;
}

}  // namespace

MTPC_OPERATOR Tensor paged_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t sliding_window,
    double softcap, const std::optional<Tensor>& sinks) {
  return attend(
      {adjacent_last(q), paged_cache(k_cache, "k_cache"), paged_cache(v_cache, "v_cache"),
       Indices(block_table, "block_table", 2), Indices(seq_lens, "seq_lens", 1),
       Indices(query_start_loc, "query_start_loc", 1), block_table.size(0),
       block_table.size(1) * k_cache.size(1), scale, sliding_window, softcap, sinks});
}

MTPC_OPERATOR Tensor latent_attention(
    const Tensor& q, const Tensor& latent_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t latent_rank) {
  STD_TORCH_CHECK(
      latent_cache.dim() == 3 && latent_rank > 0 && latent_rank <= latent_cache.size(2),
      "mtpc_cpu::latent_attention: expected latent_cache [pages, P, rank + rope], rank ",
      latent_rank);
  const Tensor t = adjacent_last(latent_cache);
  const Cache keys{t, t.size(0), t.size(1), 1, t.size(2), t.stride(0), t.stride(1), 0};
  Cache values = keys;
  values.width = latent_rank;
  return attend(
      {adjacent_last(q), keys, values, Indices(block_table, "block_table", 2),
       Indices(seq_lens, "seq_lens", 1), Indices(query_start_loc, "query_start_loc", 1),
       block_table.size(0), block_table.size(1) * latent_cache.size(1), scale, 0, 0.0,
       std::nullopt});
}

}  // namespace mtpc
