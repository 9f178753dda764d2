// Paged attention: softmax(q K^T) V over pages, split by position and merged in order.
//
// A unit (rows of one request on adjacent key/value heads) is a left fold over its splits. When
// there are more units than threads each is folded by one thread; otherwise the splits are computed
// in parallel and folded afterwards. Both do the same arithmetic in the same order.
#include <optional>

#include "attention_split.h"
#include "operators.h"

namespace mtpc {
namespace {

template <class A, class T>
class Attention {
 public:
  Attention(const Problem& problem, const Tensor& out)
      : p_(problem),
        out_(out.mutable_data_ptr()),
        splits_(problem),
        stride_(splits_.stride),
        units_(plan_units(problem, torch::stable::get_num_threads())) {}

  void run() const {
    const int64_t units = units_.size();
    const int64_t workers = worker_count(count_work(p_, units_));
    const bool enough_units = workers == 1 || units >= 4 * workers;
    if (enough_units || most_splits() <= 1) {
      run_stream(units, workers, [&](int64_t unit) {
        fold_unit(units_[unit], unit + 1 < units ? &units_[unit + 1] : nullptr);
      });
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

  /// One unit from beginning to end on one thread, which `next` follows.
  void fold_unit(const Unit& unit, const Unit* next) const {
    Memory& memory = Memory::of_this_thread();
    const int64_t rows = unit.all_rows();
    const Partial<A> split{memory.split_sums.reserve(rows * stride_), memory.split_norms};
    const Partial<A> total{memory.unit_sums.reserve(rows * stride_), memory.unit_norms};
    splits_.load_queries(unit, memory);
    const Range splits = unit.splits();
    const Next after = {next, next ? next->splits().begin : 0};
    for (int64_t s = splits.begin; s < splits.end; ++s) {
      const bool is_last = s + 1 == splits.end;
      const bool is_first = s == splits.begin;
      splits_.attend(unit, s, is_last ? after : Next{&unit, s + 1}, memory,
                     is_first ? total : split);
      if (!is_first) absorb(total, split, rows);
    }
    finish(unit, 0, rows, total);
  }

  /// For few units: all threads compute splits, each thread adjacent ones; the folds come after.
  void run_split_parallel(int64_t workers) const {
    std::vector<Next> tasks;
    std::vector<int64_t> first_task;
    int64_t heads = 0, rows = 0;
    for (const Unit& unit : units_) {
      heads += unit.heads;
      rows = std::max(rows, unit.all_rows());
      first_task.push_back(tasks.size());
      const Range splits = unit.splits();
      for (int64_t s = splits.begin; s < splits.end; ++s) tasks.push_back({&unit, s});
    }
    const Buffer<A> sums(tasks.size() * rows * stride_);
    const Buffer<Norm<A>> norms(tasks.size() * rows);
    const auto partial = [&](int64_t task) {
      return Partial<A>{sums.get() + task * rows * stride_, norms.get() + task * rows};
    };
    const int64_t count = tasks.size();
    run_stream(count, workers, [&](int64_t task) {
      Memory& memory = Memory::of_this_thread();
      splits_.load_queries(*tasks[task].unit, memory);
      const Next next = task + 1 < count ? tasks[task + 1] : Next{};
      splits_.attend(*tasks[task].unit, tasks[task].split, next, memory, partial(task));
    });
    run_tasks(heads, workers, [&](int64_t head) {
      int64_t i = 0;
      for (; head >= units_[i].heads; ++i) head -= units_[i].heads;
      const Unit& unit = units_[i];
      const int64_t first = head * unit.rows;
      const auto part = [&](int64_t s) {
        const Partial<A> split = partial(first_task[i] + s);
        return Partial<A>{split.sums + first * stride_, split.norms + first};
      };
      const Partial<A> total = part(0);
      for (int64_t s = 1; s < unit.splits().size(); ++s) absorb(total, part(s), unit.rows);
      finish(unit, first, unit.rows, total);
    });
  }

  void absorb(Partial<A> total, Partial<A> split, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      mtpc::absorb(total.sums + row * stride_, total.norms[row], split.sums + row * stride_,
                   split.norms[row], stride_);
    }
  }

  /// Normalises, with the sinks' share, and writes a unit's rows from `first` on.
  void finish(const Unit& unit, int64_t first, int64_t rows, Partial<A> total) const {
    const int64_t width = p_.values.width;
    with_type(p_.q.type, [&](auto type) {
      using Out = typename decltype(type)::type;
      for (int64_t row = 0; row < rows; ++row) {
        Norm<A> norm = total.norms[row];
        A keep = 1;
        const int64_t head = splits_.head(unit, first + row);
        if (p_.sinks) {
          A sink;
          read(&sink, *p_.sinks, head * p_.sinks->stride(0), 1);
          keep = add_sink(norm, sink);
        }
        A* sums = total.sums + row * stride_;
        normalise(sums, norm, keep, stride_);
        splits_.order(sums);
        const int64_t at = splits_.token(unit, first + row) * p_.q.heads + head;
        round_to(static_cast<Out*>(out_) + at * width, sums, width);
      }
    });
  }

  const Problem& p_;
  void* out_;
  SplitAttention<A, T> splits_;
  int64_t stride_;
  std::vector<Unit> units_;
};

Queries queries(const Tensor& q) {
  STD_TORCH_CHECK(q.dim() == 3, "mtpc_cpu: expected q [T, N, D]");
  return Queries(adjacent_last(q));
}

Cache paged_cache(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(
      tensor.dim() == 4, "mtpc_cpu::paged_attention: expected ", name, " [pages, P, H_kv, D]");
  const Tensor t = adjacent_last(tensor);
  return {t, t.size(0), t.size(1), t.size(2), t.size(3), t.stride(0), t.stride(1), t.stride(2)};
}

/// The scales of a cache of codes; other caches have none.
std::optional<Cache> paged_scales(
    const std::optional<Tensor>& scales, const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(
      scales.has_value() == holds_codes(cache), "mtpc_cpu::paged_attention: expected ", name,
      " with caches of int8 or float8_e4m3fn, and with no others");
  if (!scales) return std::nullopt;
  const Tensor& t = *scales;
  STD_TORCH_CHECK(
      t.dim() == 3 && t.size(0) == cache.size(0) && t.size(1) == cache.size(1) &&
          t.size(2) == cache.size(2) && t.scalar_type() == ScalarType::Float,
      "mtpc_cpu::paged_attention: expected float32 ", name, " [pages, P, H_kv]");
  return Cache{t, t.size(0), t.size(1), t.size(2), 1, t.stride(0), t.stride(1), t.stride(2)};
}

void check(const Problem& p) {
  STD_TORCH_CHECK(
      p.q.width == p.keys.width, "mtpc_cpu: q has width ", p.q.width, ", the keys have ",
      p.keys.width);
  STD_TORCH_CHECK(
      p.keys.heads > 0 && p.q.heads % p.keys.heads == 0, "mtpc_cpu: ", p.q.heads,
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
      dense_zeros(problem.q.tensor, {problem.q.tokens, problem.q.heads, problem.values.width});
  const auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    if (problem.q.type == ScalarType::Double) {
      Attention<double, T>(problem, out).run();
    } else {
      Attention<float, T>(problem, out).run();
    }
  };
  if (problem.key_scales) {
    run(Type<Code>{});
  } else {
    with_type(problem.keys.tensor.scalar_type(), run);
  }
  return out;
}

}  // namespace

MTPC_OPERATOR Tensor paged_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t sliding_window,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  return attend(
      {queries(q), paged_cache(k_cache, "k_cache"), paged_cache(v_cache, "v_cache"),
       Indices(block_table, "block_table", 2), Indices(seq_lens, "seq_lens", 1),
       Indices(query_start_loc, "query_start_loc", 1), block_table.size(0),
       block_table.size(1) * k_cache.size(1), scale, sliding_window, softcap, sinks,
       paged_scales(k_scale, k_cache, "k_scale"), paged_scales(v_scale, v_cache, "v_scale")});
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
      {queries(q), keys, values, Indices(block_table, "block_table", 2),
       Indices(seq_lens, "seq_lens", 1), Indices(query_start_loc, "query_start_loc", 1),
       block_table.size(0), block_table.size(1) * latent_cache.size(1), scale, 0, 0.0,
       std::nullopt});
}

}  // namespace mtpc
