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

/// Some rows of one request that look at one key/value head. Row i is token `token + i / groups`
/// of the batch, at position `position + i / groups`, where i counts from `first`.
struct Unit {
  int64_t request, kv_head;
  int64_t token, position;
  int64_t first, rows;
  Range visible;

  Range splits() const {
    return {visible.begin / kSplit, (visible.end + kSplit - 1) / kSplit};
  }
};

/// Everything about a call except the elements of its caches.
struct Problem {
  Tensor q;
  Cache keys, values;
  Indices block_table, seq_lens, query_start_loc;
  int64_t requests, context;
  double scale;
  int64_t window;
  double softcap;
  std::optional<Tensor> sinks;

  int64_t tokens() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t groups() const { return heads() / keys.heads; }

  /// The positions that a row at this position attends to.
  Range visible(int64_t position) const {
    const int64_t oldest = window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
    return {oldest, std::min(position + 1, context)};
  }

  /// The page of a position. Entries are clamped as in the reference: memory stays safe.
  int64_t page(int64_t request, int64_t position) const {
    return std::clamp<int64_t>(block_table(request, position / keys.page_size), 0, keys.pages - 1);
  }
};

/// The units of one request and key/value head.
inline void add_units(const Problem& problem, int64_t request, int64_t kv_head,
                      std::vector<Unit>& units) {
  const int64_t begin = problem.query_start_loc(request);
  const int64_t end = problem.query_start_loc(request + 1);
  const int64_t position = problem.seq_lens(request) - (end - begin);
  const int64_t groups = problem.groups();
  const int64_t rows = (std::min(end, problem.tokens()) - begin) * groups;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min(kRows, rows - first);
    const Range oldest = problem.visible(position + first / groups);
    const Range newest = problem.visible(position + (first + count - 1) / groups);
    const Range visible{oldest.begin, newest.end};
    if (visible.empty()) continue;
    units.push_back({request, kv_head, begin, position, first, count, visible});
  }
}

/// All units of a call. Requests that are off (seq_lens 0) have none: their rows stay zeros and
/// their block-table entries are never read.
inline std::vector<Unit> plan_units(const Problem& problem) {
  std::vector<Unit> units;
  for (int64_t request = 0; request < problem.requests; ++request) {
    if (problem.seq_lens(request) <= 0) continue;
    for (int64_t head = 0; head < problem.keys.heads; ++head) {
      add_units(problem, request, head, units);
    }
  }
  return units;
}

/// Multiply-adds of a call.
inline int64_t count_work(const Problem& problem, const std::vector<Unit>& units) {
  int64_t pairs = 0;
  for (const Unit& unit : units) pairs += unit.rows * unit.visible.size();
  return pairs * (problem.keys.width + problem.values.width);
}

}  // namespace mtpc
