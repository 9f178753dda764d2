// Sinkhorn-Knopp normalisation of a few small matrices, see mtpc/ops/sinkhorn.py.
#include <cmath>

#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Divides `n` elements `stride` apart by their sum plus epsilon.
template <class A>
void normalise(A* values, int64_t n, int64_t stride, A epsilon) {
  A sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += values[i * stride];
  sum += epsilon;
  for (int64_t i = 0; i < n; ++i) values[i * stride] /= sum;
}

template <class A>
void softmax_row(A* row, int64_t n, A epsilon) {
  const A peak = *std::max_element(row, row + n);
  A sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += row[i] = std::exp(row[i] - peak);
  for (int64_t i = 0; i < n; ++i) row[i] = row[i] / sum + epsilon;
}

template <class A>
void sinkhorn_matrix(A* matrix, int64_t n, int64_t rounds, A epsilon) {
  for (int64_t i = 0; i < n; ++i) softmax_row(matrix + i * n, n, epsilon);
  for (int64_t round = 0; round < rounds; ++round) {
    if (round > 0) {
      for (int64_t i = 0; i < n; ++i) normalise(matrix + i * n, n, 1, epsilon);
    }
    for (int64_t j = 0; j < n; ++j) normalise(matrix + j, n, n, epsilon);
  }
}

}  // namespace

MTPC_OPERATOR Tensor sinkhorn(const Tensor& logits, int64_t rounds, double epsilon) {
  STD_TORCH_CHECK(
      logits.dim() == 3 && logits.size(1) == logits.size(2) && logits.size(1) > 0 && rounds >= 1,
      "mtpc_cpu::sinkhorn: expected logits [T, n, n] and rounds >= 1");
  const bool wide = logits.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(
      wide || logits.scalar_type() == ScalarType::Float,
      "mtpc_cpu::sinkhorn: expected float32 or float64 logits");
  const Tensor out = torch::stable::clone(torch::stable::contiguous(logits));
  const int64_t count = out.size(0), n = out.size(1);
  // An exponential or a division is worth some ten multiply-adds.
  run_tasks(count, worker_count(20 * count * rounds * n * n), [&](int64_t t) {
    if (wide) {
      sinkhorn_matrix(static_cast<double*>(out.mutable_data_ptr()) + t * n * n, n, rounds, epsilon);
    } else {
      const auto narrow = static_cast<float>(epsilon);
      sinkhorn_matrix(static_cast<float*>(out.mutable_data_ptr()) + t * n * n, n, rounds, narrow);
    }
  });
  return out;
}

}  // namespace mtpc
