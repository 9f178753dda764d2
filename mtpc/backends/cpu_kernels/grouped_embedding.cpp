// Rows of an embedding that is packed codes with scales of groups. See mtpc/ops/grouped.py.
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "operators.h"
#include "unpack.h"

namespace mtpc {
namespace {

/// A part's values of one feature of its tile, as mtpc/weights/grouped.py computes them.
void dequantise(const GroupedWeight& part, int64_t feature, BFloat16* to) {
  const auto number = [&](const char* from, int64_t group) {
    const int64_t at = group * kFeatures + feature;
    if (part.scale_type == ScalarType::Half) {
      return static_cast<float>(reinterpret_cast<const Half*>(from)[at]);
    }
    if (part.scale_type == ScalarType::Float) return reinterpret_cast<const float*>(from)[at];
    return static_cast<float>(reinterpret_cast<const BFloat16*>(from)[at]);
  };
  for (int64_t k = 0; k < part.form.inputs; ++k) {
    const int64_t at = (k / 4 * kFeatures + feature) * 4 + k % 4, group = k / part.form.group;
    const int code = static_cast<uint8_t>(part.codes[at]);
    int zero = part.form.zero;
    if (part.zeros && !part.has_mins) {
      zero = static_cast<uint8_t>(part.zeros[group * kFeatures + feature]);
    }
    if (part.has_mins) zero = 0;
    // Rounded before the minimum is taken away: a fused instruction would not.
    volatile float value = static_cast<float>(code - zero) * number(part.scales, group);
    to[k] = static_cast<BFloat16>(part.has_mins ? value - number(part.zeros, group) : value);
  }
}

}  // namespace

MTPC_OPERATOR Tensor grouped_embedding(
    const Tensor& ids, const Tensor& codes, const Tensor& scales,
    const std::optional<Tensor>& zeros, int64_t inputs, const std::optional<Tensor>& rows) {
  STD_TORCH_CHECK(
      ids.scalar_type() == ScalarType::Long && codes.dim() == 4,
      "mtpc_cpu::grouped_embedding: expected int64 ids, and packed codes");
  const int64_t features = codes.size(0) * kFeatures;
  const GroupedWeight weight =
      grouped_weight("grouped_embedding", codes, scales, zeros, 0, features, inputs);
  STD_TORCH_CHECK(
      weight.stored != StoredCodes::kFloat8,
      "mtpc_cpu::grouped_embedding: expected codes that stand for integers, found float8");
  const Tensor dense = as_dense(ids);
  const auto* numbers = static_cast<const int64_t*>(dense.const_data_ptr());
  const int64_t used = used_rows(rows, ids.numel());
  for (int64_t i = 0; i < used; ++i) {
    STD_TORCH_CHECK(
        numbers[i] >= 0 && numbers[i] < features, "mtpc_cpu::grouped_embedding: id ", numbers[i],
        " of ", features);
  }
  std::vector<int64_t> shape = leading_sizes(dense);
  if (dense.dim() > 0) shape.push_back(dense.size(dense.dim() - 1));
  shape.push_back(inputs);
  const Tensor out = dense_empty(shape, aoti_torch_dtype_bfloat16());
  auto* to = static_cast<BFloat16*>(out.mutable_data_ptr());
  run_tasks(used, worker_count(used * inputs * kFeatures), [&](int64_t i) {
    const GroupedWeight tile = weight.from(numbers[i] / kFeatures);
    UnpackedPart part;
    for (int64_t first = 0; first < inputs; first += kUnpacked) {
      dequantise(part.take(tile, first, true), numbers[i] % kFeatures, to + i * inputs + first);
    }
  });
  return out;
}

}  // namespace mtpc
