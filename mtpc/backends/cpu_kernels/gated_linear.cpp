// SwiGLU's two linear layers on packed bfloat16 weights, and its activation. See mtpc/ops/packed.py.
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "kernels.h"
#include "packed.h"
#include "row_steps.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// A thread's own.
struct Worker {
  PassRegisters registers;
  Buffer<float> gates;
};

/// Whether both products of a feature can be had at once.
bool can_pair([[maybe_unused]] InputRows x, [[maybe_unused]] int64_t rows) {
#if defined(__AMX_TILE__)
  return !need_phases(x, rows);
#else
  return true;
#endif
}

/// out [rows, width] = silu(gate) * up, by tiles of gate and the same tiles of up.
void run(InputRows x, int64_t rows, const BFloat16* weight, int64_t width, BFloat16* out) {
  const int64_t tiles = width / kFeatures, size = x.groups * kGroupBytes;
  const char* gates = reinterpret_cast<const char*>(weight);
  const int64_t workers = worker_count(4 * rows * width * x.groups);
  run_stream<Worker>(tiles, workers, [&](int64_t tile, Worker& worker) {
    float* kept = worker.gates.reserve(rows * kFeatures);
    for_products<Bf16Pairs>(
        x, rows, gates + tile * size, worker.registers, [&](int64_t row, const float* sums) {
          std::memcpy(kept + row * kFeatures, sums, kFeatures * sizeof(float));
        });
    for_products<Bf16Pairs>(
        x, rows, gates + (tiles + tile) * size, worker.registers,
        [&](int64_t row, const float* sums) {
          BFloat16* to = out + row * width + tile * kFeatures;
          for (int i = 0; i < kFeatures; i += kStep) {
            const Vec<float> gate = load<float>(kept + row * kFeatures + i);
            const Vec<float> up = load<float>(sums + i);
            narrow(to + i, activate(round_bf16(gate), round_bf16(up)));
          }
        });
  });
}

}  // namespace

Tensor packed_gated_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& rows) {
  const int64_t width = features / 2, inputs = x.dim() == 0 ? 0 : x.size(x.dim() - 1);
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16 && features % (2 * kFeatures) == 0 &&
          is_packed_linear(weight, features, inputs),
      "mtpc_cpu::packed_gated_linear: expected bfloat16 x [..., K] and a weight of ", features,
      " features, gate's and up's, a multiple of 64, packed to [N / 32, K / 2, 32, 2]");
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const int64_t used = used_rows(rows, count_rows(x, inputs));
  Buffer<char> copy;
  const InputRows from = rows_for_products(
      static_cast<const BFloat16*>(dense.const_data_ptr()), used, inputs, copy);
  if (!can_pair(from, used)) {
    return silu_and_mul(packed_linear(dense, weight, features, std::nullopt, rows), rows);
  }
  const Tensor out = empty_rows(x, width);
  run(from, used, static_cast<const BFloat16*>(weight.const_data_ptr()), width, data(out));
  return out;
}

}  // namespace mtpc
