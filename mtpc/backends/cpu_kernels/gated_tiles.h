// SwiGLU by tiles: a tile of gate's features and the same tile of up's.
#pragma once

#include "packed.h"
#include "row_steps.h"

namespace mtpc {

/// A thread's own.
struct GatedWorker {
  PassRegisters registers;
  Buffer<float> gates;
};

/// One tile's features of silu(gate) * up, of `tiles` in each; rows of out are `stride` apart.
inline void multiply_gated(InputRows x, int64_t rows, const char* weight, int64_t tiles,
                           int64_t tile, GatedWorker& worker, BFloat16* out, int64_t stride) {
  const int64_t size = x.groups * kGroupBytes;
  float* gates = worker.gates.reserve(rows * kFeatures);
  for_products<Bf16Pairs>(
      x, rows, weight + tile * size, worker.registers, [&](int64_t row, const float* sums) {
        std::memcpy(gates + row * kFeatures, sums, kFeatures * sizeof(float));
      });
  for_products<Bf16Pairs>(
      x, rows, weight + (tiles + tile) * size, worker.registers,
      [&](int64_t row, const float* sums) {
        BFloat16* to = out + row * stride + tile * kFeatures;
        for (int i = 0; i < kFeatures; i += kStep) {
          const Vec<float> gate = load<float>(gates + row * kFeatures + i);
          narrow(to + i, activate(round_bf16(gate), round_bf16(load<float>(sums + i))));
        }
      });
}

}  // namespace mtpc
