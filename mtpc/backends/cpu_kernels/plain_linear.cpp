// Linear layers with float32 results on weights as they are stored: routers, mostly.
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "dots.h"
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// A call's operands. They are dense, except for the stride of the weights' rows.
template <class T>
struct Linear {
  const T* x;
  const T* weight;
  const float* bias;
  float* out;
  int64_t rows, inputs, features, stride;
};

/// kTile features of all rows. Each sum's order depends on the number of inputs alone.
template <class T>
void multiply(const Linear<T>& call, const T* const* inputs, int64_t begin) {
  const WeightRows<T> weights(call.weight, call.stride, begin, call.features);
  const int64_t count = std::min<int64_t>(kTile, call.features - begin);
  for_input_tiles(call.rows, [&](auto tile, int64_t first) {
    constexpr int kInputs = decltype(tile)::value;
    float sums[kTile][kInputs];
    dot_tile<kInputs>(weights, inputs + first, call.inputs, sums);
    for (int i = 0; i < kInputs; ++i) {
      float* out = call.out + (first + i) * call.features + begin;
      for (int64_t w = 0; w < count; ++w) out[w] = sums[w][i] + call.bias[begin + w];
    }
  });
}

template <class T>
void run(const Linear<T>& call) {
  std::vector<const T*> inputs;
  for (int64_t row = 0; row < call.rows; ++row) inputs.push_back(call.x + row * call.inputs);
  const int64_t workers = worker_count(call.rows * call.features * call.inputs);
  run_stream((call.features + kTile - 1) / kTile, workers, [&](int64_t tile) {
    multiply(call, inputs.data(), tile * kTile);
  });
}

void check(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1),
      "mtpc_cpu::float32_linear: expected x [..., K] and weight [N, K]");
  STD_TORCH_CHECK(
      x.scalar_type() != ScalarType::Double && weight.scalar_type() != ScalarType::Double,
      "mtpc_cpu::float32_linear: float64 operands have more digits than its results");
  STD_TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
      "mtpc_cpu::float32_linear: expected bias [", weight.size(0), "]");
}

}  // namespace

MTPC_OPERATOR Tensor float32_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check(x, weight, bias);
  const int64_t features = weight.size(0), inputs = weight.size(1);
  const bool same = x.scalar_type() == weight.scalar_type();
  const ScalarType dtype = same ? x.scalar_type() : ScalarType::Float;
  const Tensor dense = dense_in(x, dtype);
  const Tensor rows = same ? adjacent_last(weight) : dense_in(weight, dtype);
  std::vector<int64_t> shape = leading_sizes(x);
  shape.push_back(features);
  const Tensor out = torch::stable::new_empty(x, shape, ScalarType::Float);
  std::vector<float> biases(features);
  if (bias) read(biases.data(), adjacent_last(*bias), 0, features);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, double>) {
      run<T>({static_cast<const T*>(dense.const_data_ptr()),
              static_cast<const T*>(rows.const_data_ptr()), biases.data(),
              static_cast<float*>(out.mutable_data_ptr()), count_rows(x, inputs), inputs,
              features, rows.stride(0)});
    }
  });
  return out;
}

}  // namespace mtpc
