// Linear layers on packed bfloat16 weights.
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "kernels.h"
#include "linear_result.h"
#include "packed.h"
#include "row_steps.h"

namespace mtpc {
namespace {

void check(const Tensor& x, const Tensor& weight, int64_t features,
           const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && weight.scalar_type() == ScalarType::BFloat16 &&
          (!bias || bias->scalar_type() == ScalarType::BFloat16),
      "mtpc_cpu::packed_linear: x, weight and bias must be bfloat16");
  STD_TORCH_CHECK(
      x.dim() >= 1 && is_packed_linear(weight, features, x.size(x.dim() - 1)),
      "mtpc_cpu::packed_linear: expected x [..., K] and a weight of ", features,
      " features packed to [ceil(N / 32), K / 2, 32, 2]");
  STD_TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == features),
      "mtpc_cpu::packed_linear: expected bias [", features, "]");
}

}  // namespace

Tensor packed_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rows) {
  check(x, weight, features, bias);
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const Tensor out = empty_rows(x, features);
  const Biases biases(bias, features);
  const int64_t inputs = x.size(x.dim() - 1);
  const int64_t used = used_rows(rows, count_rows(x, inputs));
  Buffer<char> copy;
  const InputRows from = rows_for_products(
      static_cast<const BFloat16*>(dense.const_data_ptr()), used, inputs, copy);
  const LinearResult result{biases.get(), data(out), features, features};
  for_all_products<Bf16Pairs>(
      from, used, weight.const_data_ptr(), count_tiles(features),
      worker_count(used * features * inputs),
      [&](int64_t tile, int64_t row, const float* sums) { result.put(tile, row, sums); });
  return out;
}

}  // namespace mtpc
