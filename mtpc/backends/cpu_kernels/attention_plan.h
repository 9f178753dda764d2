// Which pages, positions and rows an attention call has to visit: the part without arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensors.h"

namespace mtpc {

/// Positions are processed in splits that begin at multiples of this, wherever the visible range
/// begins: the order in which a row adds its keys depends on its own position only.
inline constexpr int64_t kSplit = 256;

/// Rows that share one pass over a split. With this many the arithmetic takes far longer than
/// reading the keys, so that reading them again for the next rows costs nothing.
inline constexpr int64_t kRows = 64;

/// Rows of a head that take keys as they lie in a page, as many keys at a time, where the level can
/// (attention_amx.h). For more rows it pays to pack the keys.
inline constexpr int64_t kFewRows = 16;

struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return end <= begin; }
  int64_t size() const { return std::max<int64_t>(end - begin, 0); }
};

inline Range intersect(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

/// A paged cache; one latent head is a cache of one head.
struct Cache {
  Tensor tensor;
  int64_t pages, page_size, heads, width;
  int64_t page_stride, slot_stride, head_stride;
};

/// Some rows of one request that look at adjacent key/value heads. Of each head, row i is token
/// `token + i / groups` of the batch, at position `position + i / groups`, where i counts from
/// `first`.
struct Unit {
  int64_t request, kv_head, heads;
  int64_t token, position;
  int64_t first, rows;
  Range visible;

  /// Rows of all heads, those of one head side by side.
  int64_t all_rows() const { return heads * rows; }

  Range splits() const {
    return {visible.begin / kSplit, (visible.end + kSplit - 1) / kSplit};
  }
};

/// Queries [tokens, heads, width], as numbers: a tensor answers each question by a call.
struct Queries {
  explicit Queries(const Tensor& q)
      : tensor(q),
        data(q.const_data_ptr()),
        type(q.scalar_type()),
        tokens(q.size(0)),
        heads(q.size(1)),
        width(q.size(2)),
        token_stride(q.stride(0)),
        head_stride(q.stride(1)) {}

  int64_t offset(int64_t token, int64_t head) const {
    return token * token_stride + head * head_stride;
  }

  Tensor tensor;
  const void* data;
  ScalarType type;
  int64_t tokens, heads, width, token_stride, head_stride;
};

/// Everything about a call except the elements of its caches.
struct Problem {
  Queries q;
  Cache keys, values;
  Indices block_table, seq_lens, query_start_loc;
  int64_t requests, context;
  double scale;
  int64_t window;
  double softcap;
  std::optional<Tensor> sinks;
  std::optional<Cache> key_scales{}, value_scales{};  // Of width 1, for caches of codes.

  int64_t groups() const { return q.heads / keys.heads; }

  /// The positions that a row at this position attends to.
  Range visible(int64_t position) const {
    const int64_t oldest = window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
    return {oldest, std::min(position + 1, context)};
  }

  /// A request's i-th page. Entries are clamped as in the reference: memory stays safe.
  int64_t page(int64_t request, int64_t i) const {
    return std::clamp<int64_t>(block_table(request, i), 0, keys.pages - 1);
  }
};

/// The units of one request and `heads` key/value heads from `kv_head` on.
inline void add_units(const Problem& problem, int64_t request, int64_t kv_head, int64_t heads,
                      std::vector<Unit>& units) {
  const int64_t begin = problem.query_start_loc(request);
  const int64_t end = problem.query_start_loc(request + 1);
  const int64_t position = problem.seq_lens(request) - (end - begin);
  const int64_t groups = problem.groups();
  const int64_t rows = (std::min(end, problem.q.tokens) - begin) * groups;
  const int64_t most = std::max<int64_t>(kRows / heads, 1);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const Range oldest = problem.visible(position + first / groups);
    const Range newest = problem.visible(position + (first + count - 1) / groups);
    const Range visible{oldest.begin, newest.end};
    if (visible.empty()) continue;
    units.push_back({request, kv_head, heads, begin, position, first, count, visible});
  }
}

/// How many heads of a request the units take together. Adjacent heads are adjacent in memory, which
/// is read fastest in one stream; but many rows leave no time to wait for memory, and threads need
/// units or splits to share: splits differ less in size than requests do.
inline int64_t heads_together(
    const Problem& problem, int64_t request, int64_t requests, int64_t workers) {
  constexpr int64_t kStream = 512, kSplits = 4;
  const int64_t tokens = problem.query_start_loc(request + 1) - problem.query_start_loc(request);
  const Range last = problem.visible(problem.seq_lens(request) - 1);
  const int64_t rows = std::max<int64_t>(tokens * problem.groups(), 1);
  const int64_t bytes = problem.keys.width * problem.keys.tensor.element_size();
  int64_t heads = std::min({problem.keys.heads, kRows / rows, kStream / bytes});
  const auto suffice = [&] {
    const int64_t units = (problem.keys.heads + heads - 1) / heads;
    return requests * units >= std::min<int64_t>(requests, 2) * workers ||
        last.size() / kSplit * units >= kSplits * workers;
  };
  while (heads > 1 && !suffice()) heads /= 2;
  return std::max<int64_t>(heads, 1);
}

/// All units of a call. Requests that are off (seq_lens 0) have none: their rows stay zeros and
/// their block-table entries are never read.
inline std::vector<Unit> plan_units(const Problem& problem, int64_t workers) {
  std::vector<Unit> units;
  const int64_t all = problem.keys.heads;
  const auto is_on = [&](int64_t request) { return problem.seq_lens(request) > 0; };
  int64_t on = 0;
  for (int64_t request = 0; request < problem.requests; ++request) on += is_on(request);
  for (int64_t request = 0; request < problem.requests; ++request) {
    if (!is_on(request)) continue;
    const int64_t heads = heads_together(problem, request, on, workers);
    for (int64_t head = 0; head < all; head += heads) {
      add_units(problem, request, head, std::min(heads, all - head), units);
    }
  }
  return units;
}

/// Multiply-adds of a call.
inline int64_t count_work(const Problem& problem, const std::vector<Unit>& units) {
  int64_t pairs = 0;
  for (const Unit& unit : units) pairs += unit.all_rows() * unit.visible.size();
  return pairs * (problem.keys.width + problem.values.width);
}

}  // namespace mtpc
