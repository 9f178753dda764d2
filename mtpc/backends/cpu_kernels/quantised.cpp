// Linear layers on packed int8 weights.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "int8_rows.h"
#include "operators.h"
#include "maxima.h"
#include "packed.h"
#include "tensors.h"

namespace mtpc {
namespace {

void check(const Tensor& x, const Tensor& weight, const Tensor& scales,
           const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      weight.scalar_type() == ScalarType::Byte && scales.scalar_type() == ScalarType::Float &&
          scales.dim() == 1 && scales.is_contiguous(),
      "mtpc_cpu::quantised_linear: weight must be uint8, scales float32 [N]");
  STD_TORCH_CHECK(
      x.dim() >= 1 && weight.dim() == 4 && weight.is_contiguous() &&
          weight.size(0) == count_tiles(scales.size(0)) &&
          4 * weight.size(1) == x.size(x.dim() - 1) && weight.size(2) == kFeatures &&
          weight.size(3) == 4,
      "mtpc_cpu::quantised_linear: expected x [..., K] and a weight of ", scales.size(0),
      " features packed to [ceil(N / 32), K / 4, 32, 4]");
  STD_TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == scales.size(0)),
      "mtpc_cpu::quantised_linear: expected bias [", scales.size(0), "]");
}

/// Calls put(tile, row, values, count) with all tiles' features, as floats, of the rows in use.
template <class Put>
void for_results(const Tensor& x, const Tensor& weight, const Tensor& scales,
                 const std::optional<Tensor>& bias, int64_t used, const Put& put) {
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const int64_t features = scales.size(0), inputs = x.size(x.dim() - 1);
  std::vector<float> biases(features);
  if (bias) read(biases.data(), adjacent_last(*bias), 0, features);
  const Int8Rows integers = round_rows(dense, used, inputs);
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  // An instruction does twice the work that it does in bfloat16.
  const int64_t workers = worker_count(used * features * inputs / 2);
  const auto finish = [&](int64_t tile, int64_t row, const int32_t* sums) {
    const int64_t begin = tile * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    float values[kFeatures];
    for (int64_t f = 0; f < count; ++f) {
      values[f] = integers.value(row, sums[f], scale[begin + f]) + biases[begin + f];
    }
    put(tile, row, values, count);
  };
  for_all_products<Int8Quads>(
      dense_rows(integers.row(0), inputs), used, weight.const_data_ptr(), count_tiles(features),
      workers, finish);
}

}  // namespace

MTPC_OPERATOR Tensor quantised_linear(
    const Tensor& x, const Tensor& weight, const Tensor& scales,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& rows) {
  check(x, weight, scales, bias);
  const int64_t features = scales.size(0);
  const Tensor out = empty_rows(x, features);
  const int64_t used = used_rows_of(x, rows);
  for_results(
      x, weight, scales, bias, used,
      [&](int64_t tile, int64_t row, const float* values, int64_t count) {
        write(out, row * features + tile * kFeatures, values, count);
      });
  return out;
}

MTPC_OPERATOR std::tuple<Tensor, Tensor> quantised_linear_max(
    const Tensor& x, const Tensor& weight, const Tensor& scales,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& rows) {
  check(x, weight, scales, bias);
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && scales.size(0) > 0,
      "mtpc_cpu::quantised_linear_max: expected bfloat16 x, and a feature at least");
  const int64_t used = used_rows_of(x, rows);
  const Maxima maxima(used, count_tiles(scales.size(0)));
  for_results(
      x, weight, scales, bias, used,
      [&](int64_t tile, int64_t row, const float* values, int64_t count) {
        BFloat16 rounded[kFeatures];
        round_to(rounded, values, count);
        maxima.put(tile, row, rounded, count);
      });
  return write_maxima(x, used, maxima);
}

}  // namespace mtpc
