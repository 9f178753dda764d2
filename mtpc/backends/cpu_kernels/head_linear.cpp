// A linear layer for each attention head, on packed bfloat16 weights: latent attention's.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "operators.h"
#include "packed.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Of the rows, the first `used`; of others the result is zero.
struct HeadLinear {
  int64_t rows, used, heads, inputs, features;
};

/// Each head's rows side by side, [heads, used, inputs], of x [rows, heads, inputs].
void gather(const Tensor& x, const HeadLinear& s, BFloat16* to) {
  const auto* from = static_cast<const BFloat16*>(x.const_data_ptr());
  for (int64_t head = 0; head < s.heads; ++head) {
    for (int64_t row = 0; row < s.used; ++row) {
      to = std::copy_n(from + row * x.stride(0) + head * x.stride(1), s.inputs, to);
    }
  }
}

HeadLinear check(const Tensor& x, const Tensor& weight, int64_t features,
                 const std::optional<Tensor>& rows) {
  STD_TORCH_CHECK(
      x.dim() == 3 && weight.dim() == 5 && x.scalar_type() == ScalarType::BFloat16 &&
          weight.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::packed_head_linear: expected bfloat16 x [T, heads, K] and a packed weight of 5 "
      "dimensions");
  STD_TORCH_CHECK(
      weight.is_contiguous() && weight.size(0) == x.size(1) &&
          weight.size(1) == count_tiles(features) && 2 * weight.size(2) == x.size(2) &&
          weight.size(3) == kFeatures && weight.size(4) == 2,
      "mtpc_cpu::packed_head_linear: expected a weight of ", x.size(1), " heads of ", features,
      " features packed to [heads, ceil(N / 32), K / 2, 32, 2]");
  return {x.size(0), used_rows(rows, x.size(0)), x.size(1), x.size(2), features};
}

}  // namespace

MTPC_OPERATOR Tensor packed_head_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& rows) {
  const HeadLinear s = check(x, weight, features, rows);
  const Tensor out = dense_empty(x, {s.rows, s.heads, features});
  const Buffer<BFloat16> inputs(s.heads * s.used * s.inputs);
  gather(adjacent_last(x), s, inputs.get());
  const auto* weights = static_cast<const BFloat16*>(weight.const_data_ptr());
  auto* result = static_cast<BFloat16*>(out.mutable_data_ptr());
  const int64_t tiles = count_tiles(features);
  const int64_t workers = worker_count(s.used * s.heads * s.inputs * features);
  run_stream<PassRegisters>(s.heads * tiles, workers, [&](int64_t task, PassRegisters& registers) {
    const int64_t head = task / tiles, begin = task % tiles * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    const BFloat16* from = inputs.get() + head * s.used * s.inputs;
    const BFloat16* tile = weights + task * kFeatures * s.inputs;
    const InputRows x = dense_rows(from, s.inputs);
    for_products(x, s.used, tile, registers, [&](int64_t row, const float* sums) {
      BFloat16* to = result + (row * s.heads + head) * features + begin;
      for (int64_t f = 0; f < count; ++f) to[f] = static_cast<BFloat16>(sums[f]);
    });
  });
  return out;
}

}  // namespace mtpc
