// SwiGLU's two linear layers on packed bfloat16 weights, and its activation. See
// mtpc/backends/cpu/ops/packed.py.
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "gated_tiles.h"
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// out [rows, width] = silu(gate) * up.
void run(InputRows x, int64_t rows, const BFloat16* weight, int64_t width, BFloat16* out) {
  const int64_t tiles = width / kFeatures;
  const char* bytes = reinterpret_cast<const char*>(weight);
  const int64_t size = x.groups * kGroupBytes;
  const int64_t workers = worker_count(4 * rows * width * x.groups);
  run_stream_in_runs<GatedWorker>(
      tiles, workers, gated_run(rows), [&](Tasks run, GatedWorker& worker) {
        const auto products = [&](int64_t tile, const auto& body) {
          for_products(x, rows, bytes + tile * size, worker.registers, body);
        };
        multiply_gated(products, rows, tiles, run, worker.gates, GatedResult{out, width});
      });
}

}  // namespace

MTPC_OPERATOR Tensor packed_gated_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& rows) {
  const int64_t width = features / 2, inputs = x.dim() == 0 ? 0 : x.size(x.dim() - 1);
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && features % (2 * kFeatures) == 0 &&
          is_packed_linear(weight, features, inputs),
      "mtpc_cpu::packed_gated_linear: expected bfloat16 x [..., K] and a weight of ", features,
      " features, gate's and up's, a multiple of 64, packed to [N / 32, K / 2, 32, 2]");
  const Tensor dense = as_dense(x);
  const int64_t used = used_rows(rows, count_rows(x, inputs));
  Buffer<char> copy;
  const InputRows from = rows_for_products(
      static_cast<const BFloat16*>(dense.const_data_ptr()), used, inputs, copy);
  if (!goes_by_tiles(from, used)) {
    return silu_and_mul(packed_linear(dense, weight, features, std::nullopt, rows), rows);
  }
  const Tensor out = empty_rows(x, width);
  run(from, used, static_cast<const BFloat16*>(weight.const_data_ptr()), width, data(out));
  return out;
}

}  // namespace mtpc
