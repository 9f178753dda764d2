// Acceptance of drafts, and stops, see mtpc/ops/accept.py.
#include "kernels.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Values of `batch.stop_reason`, see mtpc/layout/specs.py.
enum Reason : int32_t { kRunning, kLength, kToken, kNonfinite };

/// Reads a bool tensor of one dimension in place.
class Flags {
 public:
  Flags(const Tensor& t, const char* name)
      : data_(static_cast<const bool*>(t.const_data_ptr())), stride_(t.dim() ? t.stride(0) : 0) {
    STD_TORCH_CHECK(
        t.dim() == 1 && t.scalar_type() == ScalarType::Bool, "mtpc_cpu::accept: ", name,
        " must be a bool tensor of one dimension");
  }

  bool operator()(int64_t i) const { return data_[i * stride_]; }

 private:
  const bool* data_;
  int64_t stride_;
};

std::optional<Flags> flags(const std::optional<Tensor>& t, const char* name) {
  return t ? std::optional(Flags(*t, name)) : std::nullopt;
}

/// What `accept` is given; `width` is K + 1.
struct Given {
  Indices chosen;
  Flags finite;
  Indices ids, starts, context_lens;
  Flags active;
  Indices remaining, stop_ids, slots;
  std::optional<Flags> is_prompt, goes_on;
  int64_t width, tokens, stops, slots_held;

  /// Leading drafts that equal the choice before them.
  int64_t matching(int64_t r) const {
    int64_t count = 0;
    while (count + 1 < width && draft(r, count) == chosen(r * width + count)) ++count;
    return count;
  }

  int64_t draft(int64_t r, int64_t i) const {
    return ids(std::clamp<int64_t>(starts(r) + 1 + i, 0, tokens - 1));
  }

  bool is_stop(int64_t r, int64_t column) const {
    for (int64_t e = 0; e < stops; ++e) {
      if (stop_ids(slot(r), e) == chosen(r * width + column)) return true;
    }
    return false;
  }

  int64_t slot(int64_t r) const {
    const int64_t held = slots(r);
    STD_TORCH_CHECK(
        held >= 0 && held < slots_held, "mtpc_cpu::accept: request ", r, " has slot ", held, " of ",
        slots_held);
    return held;
  }
};

struct Stop {
  int64_t emitted, remaining;
  Reason reason;
};

/// How many of `candidates` choices are emitted, and why no more will be.
Stop stop(const Given& given, int64_t r, int64_t candidates) {
  const int64_t limit = given.remaining(given.slot(r));
  const int64_t wanted = std::min(candidates, limit);
  for (int64_t j = 0; j < wanted; ++j) {
    if (!given.finite(r * given.width + j)) return {j, 0, kNonfinite};
    if (given.is_stop(r, j)) return {j + 1, 0, kToken};
  }
  if (wanted == limit) return {wanted, 0, kLength};
  return {wanted, limit - wanted, kRunning};
}

/// Writes a tensor of [R], or [R, W'] of W columns or more, in place.
template <class T>
class Column {
 public:
  Column(const Tensor& t, const char* name, int64_t requests, int64_t width = 0)
      : data_(static_cast<T*>(t.mutable_data_ptr())) {
    constexpr auto kDtype = sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int;
    STD_TORCH_CHECK(
        t.scalar_type() == kDtype && t.dim() == (width ? 2 : 1) && t.size(0) == requests &&
            (!width || (t.size(1) >= width && t.stride(1) == 1)),
        "mtpc_cpu::accept: ", name, " must be ", torch::headeronly::toString(kDtype), ", for ",
        requests, " requests", width ? " and their choices, adjacent in memory" : "");
    stride_ = t.stride(0);
  }

  T* operator[](int64_t r) const { return data_ + r * stride_; }

 private:
  T* data_;
  int64_t stride_ = 0;
};

/// Where the results go.
struct Results {
  Column<int64_t> ids;
  Column<int32_t> accepted, emitted, reason;
  Column<int64_t> anchors;
  Column<int32_t> remaining, lens;
};

void accept_request(const Given& given, int64_t r, const Results& results) {
  const bool active = given.active(r);
  const bool decodes = active && !(given.is_prompt && (*given.is_prompt)(r));
  const bool goes_on = active && given.goes_on && (*given.goes_on)(r);
  const int64_t start = given.starts(r), end = given.starts(r + 1);
  const int64_t accepted = decodes ? given.matching(r) : 0;
  Stop stopped{0, 0, kRunning};
  if (goes_on) stopped.remaining = given.remaining(given.slot(r));
  if (active && !goes_on) stopped = stop(given, r, accepted + 1);
  const int64_t anchor = active && !decodes ? end - 1 : start + accepted;
  const int64_t certain = !active ? 0 : decodes ? accepted + 1 : end - start;
  for (int64_t j = 0; j < given.width; ++j) results.ids[r][j] = given.chosen(r * given.width + j);
  *results.anchors[r] = std::clamp<int64_t>(anchor, 0, given.tokens - 1);
  *results.accepted[r] = static_cast<int32_t>(accepted);
  *results.emitted[r] = static_cast<int32_t>(stopped.emitted);
  *results.reason[r] = stopped.reason;
  *results.remaining[r] = static_cast<int32_t>(stopped.remaining);
  *results.lens[r] = static_cast<int32_t>(given.context_lens(r) + certain);
}

void check(const Given& given, int64_t requests, const Tensor& chosen, const Tensor& finite) {
  STD_TORCH_CHECK(
      given.width >= 1 && given.width * requests == chosen.size(0) &&
          finite.size(0) == chosen.size(0),
      "mtpc_cpu::accept: expected chosen and finite [R * W], found ", chosen.size(0), " and ",
      finite.size(0), " for ", requests, " requests");
  STD_TORCH_CHECK(given.tokens >= 1, "mtpc_cpu::accept: expected ids [T] with T >= 1");
}

void check_size(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(
      t.numel() == size, "mtpc_cpu::accept: expected ", size, " elements of ", name, ", found ",
      t.numel());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> accept(
    const Tensor& out_token_ids, const Tensor& num_accepted, const Tensor& num_emitted,
    const Tensor& stop_reason, const Tensor& chosen, const Tensor& finite, const Tensor& ids,
    const Tensor& query_start_loc, const Tensor& context_lens, const Tensor& active,
    const Tensor& remaining_tokens, const Tensor& stop_ids, const Tensor& state_indices,
    const std::optional<Tensor>& is_prompt, const std::optional<Tensor>& goes_on) {
  const int64_t requests = context_lens.numel();
  STD_TORCH_CHECK(requests >= 1, "mtpc_cpu::accept: expected a request at least");
  const Given given{
      Indices(chosen, "chosen", 1), Flags(finite, "finite"), Indices(ids, "ids", 1),
      Indices(query_start_loc, "query_start_loc", 1), Indices(context_lens, "context_lens", 1),
      Flags(active, "active"), Indices(remaining_tokens, "remaining_tokens", 1),
      Indices(stop_ids, "stop_ids", 2), Indices(state_indices, "state_indices", 1),
      flags(is_prompt, "is_prompt"), flags(goes_on, "goes_on"),
      chosen.numel() / requests, ids.numel(), stop_ids.size(1),
      std::min(remaining_tokens.numel(), stop_ids.size(0))};
  const Tensor anchors = dense_empty({requests}, aoti_torch_dtype_int64());
  const Tensor remaining = dense_empty({requests}, aoti_torch_dtype_int32());
  const Tensor lens = dense_empty({requests}, aoti_torch_dtype_int32());
  check(given, requests, chosen, finite);
  check_size(query_start_loc, "query_start_loc", requests + 1);
  check_size(active, "active", requests);
  check_size(state_indices, "state_indices", requests);
  if (is_prompt) check_size(*is_prompt, "is_prompt", requests);
  if (goes_on) check_size(*goes_on, "goes_on", requests);
  const Results results{
      {out_token_ids, "out_token_ids", requests, given.width},
      {num_accepted, "num_accepted", requests},
      {num_emitted, "num_emitted", requests},
      {stop_reason, "stop_reason", requests},
      {anchors, "anchors", requests},
      {remaining, "remaining", requests},
      {lens, "new_lens", requests}};
  for (int64_t r = 0; r < requests; ++r) accept_request(given, r, results);
  return {anchors, remaining, lens};
}

}  // namespace mtpc
