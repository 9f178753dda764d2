// Drafts that are copies of a request's own text, see mtpc/ops/copy_drafts.py.
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

constexpr int64_t kShortest = 3, kLongest = 32, kNoToken = -1;

/// Where a copy begins, and how many tokens before it equal the end of the text.
struct Match {
  int64_t begin = 0, length = 0;
};

/// The last of the longest matches; the first token has none before it.
Match longest_match(const int32_t* text, int64_t count) {
  Match best;
  for (int64_t begin = count - 1; begin > 0 && best.length < kLongest; --begin) {
    int64_t length = 0;
    const int64_t most = std::min(begin, kLongest);
    while (length < most && text[begin - 1 - length] == text[count - 1 - length]) ++length;
    if (length > best.length) best = {begin, length};
  }
  return best.length >= kShortest ? best : Match{};
}

}  // namespace

MTPC_OPERATOR std::tuple<Tensor, Tensor> copy_drafts(
    const Tensor& text_ids, const Tensor& ids, const Tensor& next_ids,
    const Tensor& query_start_loc, const Tensor& context_lens, const Tensor& anchors,
    const Tensor& active, const Tensor& state_slots, int64_t num_drafts) {
  const int64_t requests = anchors.numel(), tokens = ids.numel(), width = text_ids.size(1);
  STD_TORCH_CHECK(
      text_ids.dim() == 2 && text_ids.scalar_type() == ScalarType::Int && text_ids.stride(1) == 1 &&
          active.scalar_type() == ScalarType::Bool && active.numel() == requests &&
          query_start_loc.numel() == requests + 1 && context_lens.numel() == requests &&
          state_slots.numel() == requests && next_ids.numel() == tokens && num_drafts >= 1,
      "mtpc_cpu::copy_drafts: expected text_ids int32 [S, N], ids and next_ids [T], ",
      "query_start_loc [R+1], active bool [R] and the other arguments [R], for R = ", requests);
  const Indices rows(ids, "ids", 1), following(next_ids, "next_ids", 1);
  const Indices starts(query_start_loc, "query_start_loc", 1), slots(state_slots, "state_slots", 1);
  const Indices lens(context_lens, "context_lens", 1), last(anchors, "anchors", 1);
  const bool* is_active = static_cast<const bool*>(active.const_data_ptr());
  const Tensor drafts = dense_empty({requests, num_drafts}, aoti_torch_dtype_int64());
  const Tensor matched = dense_empty({requests}, aoti_torch_dtype_int32());
  for (int64_t r = 0; r < requests; ++r) {
    int64_t* out = static_cast<int64_t*>(drafts.mutable_data_ptr()) + r * num_drafts;
    Match match;
    std::fill_n(out, num_drafts, kNoToken);
    if (is_active[r * active.stride(0)]) {
      const int64_t slot = slots(r), start = starts(r), anchor = last(r), context = lens(r);
      STD_TORCH_CHECK(
          slot >= 0 && slot < text_ids.size(0) && start >= 0 && start <= anchor &&
              anchor < tokens && context >= 0,
          "mtpc_cpu::copy_drafts: request ", r, " has slot ", slot, " and rows ", start, "..",
          anchor, " from position ", context);
      int32_t* text =
          static_cast<int32_t*>(text_ids.mutable_data_ptr()) + slot * text_ids.stride(0);
      const int64_t end = context + anchor - start + 1;
      for (int64_t row = start; row <= anchor && context + row - start < width; ++row) {
        text[context + row - start] = static_cast<int32_t>(rows(row));
      }
      if (end < width) text[end] = static_cast<int32_t>(following(anchor));
      const int64_t count = std::min(end + 1, width);
      match = longest_match(text, count);
      for (int64_t i = 0; i < num_drafts && match.length > 0; ++i) {
        out[i] = text[match.begin + i % (count - match.begin)];
      }
    }
    static_cast<int32_t*>(matched.mutable_data_ptr())[r] = static_cast<int32_t>(match.length);
  }
  return {drafts, matched};
}

}  // namespace mtpc
