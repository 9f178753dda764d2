// Linear layers on packed bfloat16 weights.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// A call's operands.
struct Linear {
  InputRows x;
  const BFloat16* weight;
  const float* bias;  // may be null
  BFloat16* out;
  int64_t rows, inputs, features;
};

void run(const Linear& call) {
  const auto finish = [&](int64_t tile, int64_t row, const float* sums) {
    const int64_t begin = tile * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, call.features - begin);
    BFloat16* out = call.out + row * call.features + begin;
    const float* bias = call.bias ? call.bias + begin : nullptr;
    if (count == kFeatures && !bias) return narrow_sums<kFeatures>(out, sums);
    for (int64_t f = 0; f < count; ++f) {
      out[f] = static_cast<BFloat16>(sums[f] + (bias ? bias[f] : 0.0f));
    }
  };
  const int64_t workers = worker_count(call.rows * call.features * call.inputs);
  for_all_products<Bf16Pairs>(
      call.x, call.rows, call.weight, count_tiles(call.features), workers, finish);
}

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
  std::vector<float> biases(bias ? features : 0);
  if (bias) read(biases.data(), adjacent_last(*bias), 0, features);
  const int64_t inputs = x.size(x.dim() - 1);
  const int64_t used = used_rows(rows, count_rows(x, inputs));
  Buffer<char> copy;
  run({rows_for_products(
           static_cast<const BFloat16*>(dense.const_data_ptr()), used, inputs, copy),
       static_cast<const BFloat16*>(weight.const_data_ptr()), bias ? biases.data() : nullptr,
       static_cast<BFloat16*>(out.mutable_data_ptr()), used, inputs, features});
  return out;
}

}  // namespace mtpc
