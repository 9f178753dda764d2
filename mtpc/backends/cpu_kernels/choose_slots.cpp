// The indexer of sparse attention, see mtpc/ops/choose_slots.py.
//
// Scores first, in tasks of a few rows of one request and one split of its positions, then each
// row's choice. A row that sees no more positions than it may choose is given all, unscored.
#include <numeric>

#include "attention_tiles.h"
#include "operators.h"

namespace mtpc {
namespace {

/// Rows that share one pass over a split of keys.
constexpr int64_t kIndexRows = 16;

struct Choice {
  Cache keys;
  Indices block_table, seq_lens, query_start_loc;
  int64_t requests, tokens, heads, context, count;

  int64_t slot(int64_t request, int64_t position) const {
    const int64_t page = block_table(request, position / keys.page_size);
    return std::clamp<int64_t>(page, 0, keys.pages - 1) * keys.page_size +
        position % keys.page_size;
  }
};

/// Row `token` of the batch, which sees the first `visible` positions of its request.
struct Row {
  int64_t token, request, visible;
};

/// Rows [first, last) of one request, which see `visible` positions at most.
struct Block {
  int64_t first, last, visible;
};

/// The rows that attend to something, by request.
std::vector<Row> plan_rows(const Choice& c) {
  std::vector<Row> rows;
  for (int64_t request = 0; request < c.requests; ++request) {
    const int64_t length = c.seq_lens(request), end = c.query_start_loc(request + 1);
    if (length <= 0) continue;
    for (int64_t t = c.query_start_loc(request); t < std::min(end, c.tokens); ++t) {
      const int64_t visible = std::min(length - (end - t) + 1, c.context);
      if (visible > 0) rows.push_back({t, request, visible});
    }
  }
  return rows;
}

/// Rows that have to choose, in blocks; a request's later rows see more, so its last ones do.
std::vector<Block> plan_blocks(const std::vector<Row>& rows, int64_t count) {
  std::vector<Block> blocks;
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()); ++i) {
    if (rows[i].visible <= count) continue;
    const bool joins = !blocks.empty() && blocks.back().last == i &&
        rows[i - 1].request == rows[i].request &&
        i - blocks.back().first < kIndexRows;
    if (!joins) blocks.push_back({i, i, 0});
    blocks.back().last = i + 1;
    blocks.back().visible = rows[i].visible;
  }
  return blocks;
}

/// A is the accumulation type. Only scoring depends on the type of the keys.
template <class A>
class Chooser {
 public:
  Chooser(const Choice& choice, const Tensor& query, const Tensor& weights, int32_t* out)
      : c_(choice),
        query_(static_cast<const A*>(query.const_data_ptr())),
        weights_(static_cast<const A*>(weights.const_data_ptr())),
        out_(out),
        rows_(plan_rows(choice)),
        blocks_(plan_blocks(rows_, choice.count)) {
    int64_t longest = 0;
    for (const Block& block : blocks_) longest = std::max(longest, block.visible);
    stride_ = (longest + kSplit - 1) / kSplit * kSplit;
    int64_t scored = 0;
    for (const Block& block : blocks_) {
      place_.push_back(scored);
      scored += block.last - block.first;
    }
    totals_.reserve(scored * stride_);
  }

  /// Scores against keys of type T, then chooses.
  template <class T>
  void run() {
    struct Task {
      int64_t block, split;
    };
    const T* keys = static_cast<const T*>(c_.keys.tensor.const_data_ptr());
    std::vector<Task> tasks;
    int64_t pairs = 0;
    for (int64_t b = 0; b < static_cast<int64_t>(blocks_.size()); ++b) {
      for (int64_t s = 0; s * kSplit < blocks_[b].visible; ++s) tasks.push_back({b, s});
      pairs += (blocks_[b].last - blocks_[b].first) * blocks_[b].visible;
    }
    run_tasks(tasks.size(), worker_count(pairs * c_.heads * c_.keys.width), [&](int64_t t) {
      score(keys, tasks[t].block, tasks[t].split);
    });
    choose(pairs);
  }

 private:
  /// What each row chooses, of `pairs` scores in all.
  void choose(int64_t pairs) {
    for (const Row& row : rows_) {
      if (row.visible <= c_.count) take_all(row);
    }
    // Choosing among n positions is worth some sixteen multiply-adds for each.
    run_tasks(blocks_.size(), worker_count(16 * pairs), [&](int64_t b) {
      for (int64_t i = blocks_[b].first; i < blocks_[b].last; ++i) {
        take_best(rows_[i], totals_.get() + (place_[b] + i - blocks_[b].first) * stride_);
      }
    });
  }

  /// Memory of one thread, kept between calls.
  struct Scratch {
    Buffer<A> panel, scores;
    Buffer<int32_t> order;

    static Scratch& of_this_thread() {
      static thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
      return *scratch;
    }
  };

  /// Totals of a block's rows over one split of positions, panel by panel.
  template <class T>
  void score(const T* all_keys, int64_t b, int64_t split) {
    const Block& block = blocks_[b];
    const int64_t base = split * kSplit, width = c_.keys.width;
    const int64_t seen = std::min(block.visible - base, kSplit);
    const T* keys[kSplit];
    std::fill_n(keys, kSplit, nullptr);
    for (int64_t j = 0; j < seen; ++j) {
      const int64_t slot = c_.slot(rows_[block.first].request, base + j);
      keys[j] = all_keys + slot / c_.keys.page_size * c_.keys.page_stride +
          slot % c_.keys.page_size * c_.keys.slot_stride;
    }
    Scratch& memory = Scratch::of_this_thread();
    A* panel = memory.panel.reserve(width * kPanel<A>);
    for (int64_t j = 0; j < seen; j += kPanel<A>) {
      pack_panel<A>(keys + j, 0, width, panel);
      for (int64_t i = block.first; i < block.last; ++i) {
        A* totals = totals_.get() + (place_[b] + i - block.first) * stride_ + base + j;
        score_row(rows_[i].token, panel, memory.scores.reserve(c_.heads * kSplit), totals);
      }
    }
  }

  /// totals[j] = sum over heads, in order, of weight * relu(query . key j), of one panel.
  void score_row(int64_t token, const A* panel, A* scores, A* totals) const {
    const A* queries = query_ + token * c_.heads * c_.keys.width;
    for_row_tiles(c_.heads, [&](auto tile, int64_t head) {
      score_tile<decltype(tile)::value>(
          queries + head * c_.keys.width, c_.keys.width, panel, scores + head * kSplit);
    });
    const A* weights = weights_ + token * c_.heads;
    for (int64_t part = 0; part < kPanel<A>; part += kLanes<A>) {
      Vec<A> total{};
      for (int64_t head = 0; head < c_.heads; ++head) {
        const Vec<A> score = load<A>(scores + head * kSplit + part);
        // A score that is not a number passes, and so does its position.
        total += weights[head] * (score < 0 ? Vec<A>{} : score);
      }
      store(totals + part, total == total ? total : Vec<A>{} + kInfinity<A>);
    }
  }

  void take_all(const Row& row) const {
    int32_t* out = out_ + row.token * c_.count;
    for (int64_t p = 0; p < row.visible; ++p) {
      out[p] = static_cast<int32_t>(c_.slot(row.request, p));
    }
  }

  /// Of equal scores, the earlier position.
  void take_best(const Row& row, const A* totals) const {
    int32_t* order = Scratch::of_this_thread().order.reserve(row.visible);
    std::iota(order, order + row.visible, 0);
    std::nth_element(
        order, order + c_.count - 1, order + row.visible, [&](int32_t a, int32_t b) {
          return totals[a] != totals[b] ? totals[a] > totals[b] : a < b;
        });
    std::sort(order, order + c_.count);
    int32_t* out = out_ + row.token * c_.count;
    for (int64_t k = 0; k < c_.count; ++k) {
      out[k] = static_cast<int32_t>(c_.slot(row.request, order[k]));
    }
  }

  const Choice& c_;
  const A* query_;
  const A* weights_;
  int32_t* out_;
  std::vector<Row> rows_;
  std::vector<Block> blocks_;
  std::vector<int64_t> place_;  // a block's first row among the scored ones
  int64_t stride_ = 0;
  Buffer<A> totals_;
};

void check(const Tensor& query, const Tensor& weights, const Tensor& cache, int64_t count) {
  STD_TORCH_CHECK(
      query.dim() == 3 && cache.dim() == 3 && query.size(2) == cache.size(2) && count >= 1,
      "mtpc_cpu::choose_slots: expected query [T, H, D], index_cache [N, P, D] and count >= 1");
  STD_TORCH_CHECK(
      weights.dim() == 2 && weights.size(0) == query.size(0) && weights.size(1) == query.size(1),
      "mtpc_cpu::choose_slots: expected weights [T, H] for query [T, H, D]");
  STD_TORCH_CHECK(
      cache.size(0) * cache.size(1) < int64_t{1} << 31,
      "mtpc_cpu::choose_slots: slots are int32, the cache has ", cache.size(0) * cache.size(1));
}

}  // namespace

MTPC_OPERATOR Tensor choose_slots(
    const Tensor& query, const Tensor& weights, const Tensor& index_cache,
    const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
    int64_t count) {
  check(query, weights, index_cache, count);
  const Tensor t = adjacent_last(index_cache);
  const int64_t context = block_table.size(1) * t.size(1);
  const Choice choice{
      {t, t.size(0), t.size(1), 1, t.size(2), t.stride(0), t.stride(1), 0},
      Indices(block_table, "block_table", 2), Indices(seq_lens, "seq_lens", 1),
      Indices(query_start_loc, "query_start_loc", 1), block_table.size(0), query.size(0),
      query.size(1), context, std::min(count, context)};
  const Tensor out =
      torch::stable::new_empty(query, {choice.tokens, choice.count}, ScalarType::Int);
  auto* const slots = static_cast<int32_t*>(out.mutable_data_ptr());
  std::fill_n(slots, choice.tokens * choice.count, -1);
  with_type(t.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    if (query.scalar_type() == ScalarType::Double) {
      const Tensor q = dense_in(query, ScalarType::Double);
      Chooser<double>(choice, q, dense_in(weights, ScalarType::Double), slots).run<T>();
    } else {
      const Tensor q = dense_in(query, ScalarType::Float);
      Chooser<float>(choice, q, dense_in(weights, ScalarType::Float), slots).run<T>();
    }
  });
  return out;
}

}  // namespace mtpc
