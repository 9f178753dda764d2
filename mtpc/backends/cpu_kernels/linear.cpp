// Linear layers on packed bfloat16 weights.
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "operators.h"
#include "linear_result.h"
#include "maxima.h"
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

/// Calls put(tile, row, its 32 sums) for all tiles of the rows in use.
template <class Put>
void for_results(const Tensor& x, const Tensor& weight, int64_t features, int64_t used,
                 const Put& put) {
  const Tensor dense = as_dense(x);
  const int64_t inputs = x.size(x.dim() - 1);
  Buffer<char> copy;
  const InputRows from = rows_for_products(
      static_cast<const BFloat16*>(dense.const_data_ptr()), used, inputs, copy);
  for_all_products(
      from, used, weight.const_data_ptr(), count_tiles(features),
      worker_count(used * features * inputs), put);
}

}  // namespace

MTPC_OPERATOR Tensor packed_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rows) {
  check(x, weight, features, bias);
  const Tensor out = empty_rows(x, features);
  const Biases biases(bias, features);
  const LinearResult result{biases.get(), data(out), features, features};
  for_results(
      x, weight, features, used_rows_of(x, rows),
      [&](int64_t tile, int64_t row, const float* sums) { result.put(tile, row, sums); });
  return out;
}

MTPC_OPERATOR std::tuple<Tensor, Tensor> packed_linear_max(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rows) {
  check(x, weight, features, bias);
  STD_TORCH_CHECK(features > 0, "mtpc_cpu::packed_linear_max: expected a feature at least");
  const Biases biases(bias, features);
  const int64_t used = used_rows_of(x, rows);
  const Maxima maxima(used, count_tiles(features));
  const LinearResult result{biases.get(), nullptr, features, 0};
  for_results(
      x, weight, features, used, [&](int64_t tile, int64_t row, const float* sums) {
        BFloat16 values[kFeatures];
        maxima.put(tile, row, values, result.round(tile, sums, values));
      });
  return write_maxima(x, used, maxima);
}

}  // namespace mtpc
