// Linear layers on packed codes of 4 or 8 bits with scales of groups. See mtpc/ops/grouped.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "gated_tiles.h"
#include "grouped_products.h"
#include "linear_result.h"
#include "maxima.h"
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

GroupedWeight check(const Tensor& x, const Tensor& codes, const Tensor& scales,
                    const std::optional<Tensor>& zeros, int64_t features,
                    const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && (!bias || (bias->dim() == 1 && bias->size(0) == features)),
      "mtpc_cpu::grouped_linear: expected x [..., K], and bias [", features, "] if any");
  return grouped_weight(
      "grouped_linear", codes, scales, zeros, 0, features, x.size(x.dim() - 1));
}

/// The rows in use as products take them.
GroupedRows rounded(const Tensor& x, const GroupedWeight& weight, int64_t used) {
  GroupedRows rows(used, weight.form);
  set_rows(rows, as_dense(x), used);
  return rows;
}

/// How many threads they are worth: an instruction does twice the work that it does in bfloat16.
int64_t workers(const GroupedWeight& weight, int64_t used) {
  return worker_count(used * weight.tiles * kFeatures * weight.form.inputs / 2);
}

/// Calls put(tile, row, its 32 sums) for all tiles of the rows in use.
template <class Put>
void for_results(const Tensor& x, const GroupedWeight& weight, int64_t used, const Put& put) {
  const GroupedRows rows = rounded(x, weight, used);
  const auto multiply = [&](int64_t tile, PassRegisters& registers) {
    for_grouped_products(
        rows, 0, used, weight.from(tile), registers,
        [&](int64_t row, const float* sums) { put(tile, row, sums); });
  };
  run_stream<PassRegisters>(weight.tiles, workers(weight, used), multiply);
}

/// Writes results of any dtype but bfloat16.
void write_results(const Tensor& x, const GroupedWeight& weight, int64_t used, const float* bias,
                   int64_t features, const Tensor& out) {
  for_results(x, weight, used, [&](int64_t tile, int64_t row, const float* sums) {
    const int64_t begin = tile * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    float values[kFeatures];
    for (int64_t f = 0; f < count; ++f) values[f] = bias ? sums[f] + bias[begin + f] : sums[f];
    write(out, row * features + begin, values, count);
  });
}

}  // namespace

MTPC_OPERATOR Tensor grouped_linear(
    const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
    int64_t features, const std::optional<Tensor>& bias, const std::optional<Tensor>& rows) {
  const GroupedWeight weight = check(x, codes, scales, zeros, features, bias);
  const Tensor out = empty_rows(x, features);
  const Biases biases(bias, features);
  const int64_t used = used_rows_of(x, rows);
  if (x.scalar_type() != ScalarType::BFloat16) {
    write_results(x, weight, used, biases.get(), features, out);
    return out;
  }
  const LinearResult result{biases.get(), data(out), features, features};
  for_results(x, weight, used, [&](int64_t tile, int64_t row, const float* sums) {
    result.put(tile, row, sums);
  });
  return out;
}

MTPC_OPERATOR std::tuple<Tensor, Tensor> grouped_linear_max(
    const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
    int64_t features, const std::optional<Tensor>& bias, const std::optional<Tensor>& rows) {
  const GroupedWeight weight = check(x, codes, scales, zeros, features, bias);
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && features > 0,
      "mtpc_cpu::grouped_linear_max: expected bfloat16 x, and a feature at least");
  const Biases biases(bias, features);
  const LinearResult result{biases.get(), nullptr, features, 0};
  const int64_t used = used_rows_of(x, rows);
  const Maxima maxima(used, weight.tiles);
  for_results(x, weight, used, [&](int64_t tile, int64_t row, const float* sums) {
    BFloat16 values[kFeatures];
    maxima.put(tile, row, values, result.round(tile, sums, values));
  });
  return write_maxima(x, used, maxima);
}

MTPC_OPERATOR Tensor grouped_gated_linear(
    const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
    int64_t features, const std::optional<Tensor>& rows) {
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && features % (2 * kFeatures) == 0,
      "mtpc_cpu::grouped_gated_linear: expected bfloat16 x, and gate's and up's features, a "
      "multiple of 64; found ", features);
  const GroupedWeight weight = check(x, codes, scales, zeros, features, std::nullopt);
  const int64_t width = features / 2, tiles = weight.tiles / 2, used = used_rows_of(x, rows);
  const Tensor out = empty_rows(x, width);
  const GroupedRows from = rounded(x, weight, used);
  run_stream_in_runs<GatedWorker>(
      tiles, workers(weight, used), gated_run(used), [&](Tasks run, GatedWorker& worker) {
        const auto products = [&](int64_t tile, const auto& body) {
          for_grouped_products(from, 0, used, weight.from(tile), worker.registers, body);
        };
        multiply_gated(products, used, tiles, run, worker.gates, GatedResult{data(out), width});
      });
  return out;
}

}  // namespace mtpc
