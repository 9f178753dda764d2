// Operators between linears: norms, activations, and zeros for idle rows. See
// mtpc/ops/fused.py and mtpc/ops/ragged.py.
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "operators.h"
#include "norm.h"

namespace mtpc {
namespace {

Norm check_norm(const Tensor& x, const Tensor& weight, double epsilon, bool plus_one) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1) &&
          weight.is_contiguous() && x.scalar_type() == ScalarType::BFloat16 &&
          weight.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::rms_norm: expected bfloat16 x [..., N] and weight [N]");
  return {static_cast<const BFloat16*>(weight.const_data_ptr()), weight.size(0),
          static_cast<float>(epsilon), plus_one};
}

void check_clear(const Tensor& x, int64_t features) {
  STD_TORCH_CHECK(
      x.is_contiguous() && features >= 0 && features <= x.dim(),
      "mtpc_cpu::clear_idle_rows: expected a dense x of at least ", features, " dimensions");
}

}  // namespace

MTPC_OPERATOR Tensor rms_norm(
    const Tensor& x, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows) {
  const Norm norm = check_norm(x, weight, epsilon, plus_one);
  const Tensor from = adjacent_last(x);
  const Tensor out = empty_rows(x, norm.width);
  const int64_t used = used_rows(rows, count_rows(x, norm.width));
  const RowStarts starts(from);
  run_tasks(used, worker_count(used * norm.width * kWork), [&](int64_t r) {
    norm(starts(r), data(out) + r * norm.width);
  });
  return out;
}

MTPC_OPERATOR std::tuple<Tensor, Tensor> add_rms_norm(
    const Tensor& x, const Tensor& added, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows) {
  const Norm norm = check_norm(x, weight, epsilon, plus_one);
  STD_TORCH_CHECK(
      added.scalar_type() == ScalarType::BFloat16 && added.dim() == x.dim() &&
          added.numel() == x.numel() && added.size(x.dim() - 1) == norm.width,
      "mtpc_cpu::add_rms_norm: both summands must have one shape");
  const Tensor left = adjacent_last(x), right = adjacent_last(added);
  const Tensor total = empty_rows(x, norm.width), out = empty_rows(x, norm.width);
  const int64_t used = used_rows(rows, count_rows(x, norm.width));
  const RowStarts lefts(left), rights(right);
  run_tasks(used, worker_count(used * norm.width * kWork), [&](int64_t r) {
    const int64_t at = r * norm.width;
    norm.of_sum(lefts(r), rights(r), data(total) + at, data(out) + at);
  });
  return {total, out};
}

MTPC_OPERATOR Tensor silu_and_mul(const Tensor& gate_up, const std::optional<Tensor>& rows) {
  const int64_t both = gate_up.dim() == 0 ? 1 : gate_up.size(gate_up.dim() - 1), width = both / 2;
  STD_TORCH_CHECK(
      both % 2 == 0 && gate_up.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::silu_and_mul: expected bfloat16 gate_up [..., 2 I]");
  const Tensor from = adjacent_last(gate_up);
  const Tensor out = empty_rows(gate_up, width);
  const int64_t used = used_rows(rows, count_rows(gate_up, both));
  const RowStarts starts(from);
  // An exponential and a division are worth as much as all else.
  run_tasks(used, worker_count(used * width * 2 * kWork), [&](int64_t r) {
    const BFloat16* gate = starts(r);
    BFloat16* to = data(out) + r * width;
    for_steps(width, [&](int64_t i, auto count) {
      put(to + i, activate(take(gate + i, count), take(gate + width + i, count)), count);
    });
  });
  return out;
}

MTPC_OPERATOR void clear_idle_rows(const Tensor& x, const Tensor& rows, int64_t features) {
  check_clear(x, features);
  int64_t width = x.element_size();
  for (int64_t dim = x.dim() - features; dim < x.dim(); ++dim) width *= x.size(dim);
  const int64_t bytes = x.numel() * x.element_size();
  const int64_t used = used_rows(rows, width == 0 ? 0 : bytes / width) * width;
  std::memset(static_cast<char*>(x.mutable_data_ptr()) + used, 0, bytes - used);
}

}  // namespace mtpc
