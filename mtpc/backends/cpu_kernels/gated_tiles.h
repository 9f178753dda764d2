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

/// Tiles of gate's that a worker goes through before the same tiles of up's. Each change from gate
/// to up breaks a stream of memory, so it takes as many as the first-level cache holds gates of.
inline int64_t gated_run(int64_t rows) {
  constexpr int64_t kGateBytes = 8 << 10, kMostTiles = 8;
  const int64_t tile_bytes = rows * kFeatures * sizeof(float);
  return std::clamp<int64_t>(kGateBytes / std::max<int64_t>(tile_bytes, 1), 1, kMostTiles);
}

/// Elements that `GatedWorker::gates` must hold.
inline int64_t gates_of_run(int64_t rows) { return gated_run(rows) * rows * kFeatures; }

/// Some tiles' features of silu(gate) * up, of `tiles` in each: put(tile, row, the 32 features).
/// products(tile, body) calls body(row, its 32 sums) for all rows.
template <class Products, class Put>
void multiply_gated(const Products& products, int64_t rows, int64_t tiles, Tasks run,
                    Buffer<float>& buffer, const Put& put) {
  float* gates = buffer.reserve(gates_of_run(rows));
  for (int64_t i = 0; i < run.count; ++i) {
    products(run.first + i, [&](int64_t row, const float* sums) {
      std::memcpy(gates + (i * rows + row) * kFeatures, sums, kFeatures * sizeof(float));
    });
  }
  for (int64_t i = 0; i < run.count; ++i) {
    products(tiles + run.first + i, [&](int64_t row, const float* sums) {
      const float* gate = gates + (i * rows + row) * kFeatures;
      BFloat16 features[kFeatures];
      for (int f = 0; f < kFeatures; f += kStep) {
        narrow(features + f,
               activate(round_bf16(load<float>(gate + f)), round_bf16(load<float>(sums + f))));
      }
      put(run.first + i, row, features);
    });
  }
}

/// Puts features into rows of `out`, which are `stride` apart.
struct GatedResult {
  BFloat16* out;
  int64_t stride;

  void operator()(int64_t tile, int64_t row, const BFloat16 (&features)[kFeatures]) const {
    std::memcpy(out + row * stride + tile * kFeatures, features, sizeof(features));
  }
};

}  // namespace mtpc
