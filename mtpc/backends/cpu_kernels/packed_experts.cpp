// Mixture of experts on packed bfloat16 weights: every chosen expert's are read once.
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <vector>

#include "choices.h"
#include "operators.h"
#include "packed.h"

namespace mtpc {
namespace {

struct Shape {
  int64_t tokens, hidden, experts, intermediate;
  int64_t used;  // Leading tokens; of others the result is zero.
  Limit limit;
};

class PackedExperts {
 public:
  PackedExperts(const Shape& shape, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                const Tensor& ids, const Tensor& weights)
      : s_(shape),
        gate_up_(static_cast<const BFloat16*>(gate_up.const_data_ptr())),
        down_(static_cast<const BFloat16*>(down.const_data_ptr())),
        choices_(group_rows<BFloat16>(ids, weights, shape.experts, shape.used)),
        inputs_(choices_.slots * shape.hidden),
        active_(choices_.slots * shape.intermediate) {
    gather(static_cast<const BFloat16*>(x.const_data_ptr()));
  }

  void run(BFloat16* out) {
    const int64_t experts = choices_.chosen.size();
    const int64_t work = choices_.slots * s_.hidden * s_.intermediate;
    const int64_t gates = s_.intermediate / kFeatures, outputs = count_tiles(s_.hidden);
    using R = PassRegisters;
    run_tasks<R>(experts * gates, worker_count(2 * work), [&](int64_t task, R& registers) {
      activate(choices_.chosen[task / gates], task % gates, registers);
    });
    run_tasks<R>(outputs, worker_count(work), [&](int64_t tile, R& registers) {
      combine(tile, registers, out);
    });
  }

 private:
  /// Each choice's rows side by side.
  void gather(const BFloat16* x) {
    BFloat16* to = inputs_.get();
    for (const Choice<float>& choice : choices_.chosen) {
      for (const int64_t row : choice.rows) {
        to = std::copy_n(x + row * s_.hidden, s_.hidden, to);
      }
    }
  }

  /// A tile of gate and its tile of up: `swiglu` of the choice's rows, 32 features.
  void activate(const Choice<float>& choice, int64_t tile, PassRegisters& registers) const {
    const int64_t rows = choice.rows.size(), size = kFeatures * s_.hidden;
    const InputRows x = dense_rows(inputs_.get() + choice.first_slot * s_.hidden, s_.hidden);
    const BFloat16* gate = gate_up_ + choice.expert * 2 * s_.intermediate * s_.hidden + tile * size;
    const BFloat16* up = gate + s_.intermediate * s_.hidden;
    BFloat16* out = active_.get() + choice.first_slot * s_.intermediate + tile * kFeatures;
    activate_tile(
        rows, [&](const auto& body) { for_products(x, rows, gate, registers, body); },
        [&](const auto& body) { for_products(x, rows, up, registers, body); }, s_.limit, out,
        s_.intermediate);
  }

  /// 32 output features of all rows: the weighted sum over experts, in index order.
  void combine(int64_t tile, PassRegisters& registers, BFloat16* out) const {
    const int64_t begin = tile * kFeatures, tiles = count_tiles(s_.hidden);
    const int64_t count = std::min<int64_t>(kFeatures, s_.hidden - begin);
    const auto products = [&](const Choice<float>& choice, const auto& body) {
      const InputRows active =
          dense_rows(active_.get() + choice.first_slot * s_.intermediate, s_.intermediate);
      const BFloat16* weights =
          down_ + (choice.expert * tiles + tile) * kFeatures * s_.intermediate;
      for_products(active, choice.rows.size(), weights, registers, body);
    };
    const std::vector<float> total = combine_tile(choices_, s_.tokens, products);
    for (int64_t row = 0; row < s_.tokens; ++row) {
      for (int64_t f = 0; f < count; ++f) {
        out[row * s_.hidden + begin + f] = static_cast<BFloat16>(total[row * kFeatures + f]);
      }
    }
  }

  const Shape s_;
  const BFloat16* gate_up_;
  const BFloat16* down_;
  const Choices<float> choices_;
  Buffer<BFloat16> inputs_;  // [slots, hidden]
  Buffer<BFloat16> active_;  // [slots, intermediate]
};

bool is_packed(const Tensor& weight, int64_t tiles, int64_t inputs) {
  return weight.scalar_type() == ScalarType::BFloat16 && weight.is_contiguous() &&
      weight.size(1) == tiles && 2 * weight.size(2) == inputs && weight.size(3) == kFeatures &&
      weight.size(4) == 2;
}

Shape check(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
            const Tensor& weights, const std::optional<Tensor>& rows, Limit limit) {
  STD_TORCH_CHECK(
      x.dim() == 2 && gate_up.dim() == 5 && down.dim() == 5 &&
          x.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::packed_experts: expected bfloat16 x [T, H], packed gate_up and down of 5 "
      "dimensions");
  const Shape s{x.size(0),        x.size(1), down.size(0),
                2 * down.size(2), used_rows(rows, x.size(0)), limit};
  STD_TORCH_CHECK(
      s.intermediate % kFeatures == 0 && gate_up.size(0) == s.experts &&
          is_packed(gate_up, 2 * s.intermediate / kFeatures, s.hidden) &&
          is_packed(down, count_tiles(s.hidden), s.intermediate),
      "mtpc_cpu::packed_experts: gate_up [E, 2I / 32, H / 2, 32, 2] and down "
      "[E, ceil(H / 32), I / 2, 32, 2] do not fit x [T, H]");
  check_choices("packed_experts", ids, weights, s.tokens);
  return s;
}

}  // namespace

MTPC_OPERATOR Tensor packed_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights, double limit, bool limit_input, bool gelu,
    const std::optional<Tensor>& rows) {
  const Shape shape =
      check(x, gate_up, down, expert_ids, expert_weights, rows, {limit, limit_input, gelu});
  const Tensor dense = as_dense(x);
  const Tensor weights = adjacent_last(expert_weights);
  const Tensor out = dense_empty(dense, {shape.tokens, shape.hidden});
  PackedExperts(shape, dense, gate_up, down, expert_ids, weights)
      .run(static_cast<BFloat16*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace mtpc
