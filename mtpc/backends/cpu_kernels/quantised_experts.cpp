// Mixture of experts on packed int8 weights: every chosen expert's are read once.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "choices.h"
#include "int8_rows.h"
#include "operators.h"
#include "packed.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Stacked weights of int8, their scales [experts, features], and their sizes.
struct Stack {
  const uint8_t* weights;
  const float* scales;
  int64_t inputs, features;

  int64_t tiles() const { return count_tiles(features); }

  const uint8_t* tile(int64_t expert, int64_t t) const {
    return weights + (expert * tiles() + t) * kFeatures * inputs;
  }
};

class QuantisedExperts {
 public:
  QuantisedExperts(const Tensor& x, const Stack& gate_up, const Stack& down,
                   Choices<float> choices, int64_t used, Limit limit)
      : gate_up_(gate_up),
        down_(down),
        choices_(std::move(choices)),
        limit_(limit),
        inputs_(choices_.slots, gate_up.inputs),
        active_(choices_.slots * down.inputs),
        rounded_(choices_.slots, down.inputs) {
    const Int8Rows rows = round_rows(x, used, gate_up.inputs);
    for (const Choice<float>& choice : choices_.chosen) {
      for (size_t i = 0; i < choice.rows.size(); ++i) {
        inputs_.copy(choice.first_slot + i, rows, choice.rows[i]);
      }
    }
  }

  void run(const Tensor& out) {
    const int64_t experts = choices_.chosen.size(), gates = down_.inputs / kFeatures;
    // An instruction does twice the work that it does in bfloat16.
    const int64_t work = choices_.slots * gate_up_.inputs * down_.inputs / 2;
    using R = PassRegisters;
    run_tasks<R>(experts * gates, worker_count(2 * work), [&](int64_t task, R& registers) {
      activate(choices_.chosen[task / gates], task % gates, registers);
    });
    run_tasks(choices_.slots, worker_count(8 * choices_.slots * down_.inputs), [&](int64_t slot) {
      rounded_.set(slot, active_.get() + slot * down_.inputs);
    });
    run_tasks<R>(down_.tiles(), worker_count(work), [&](int64_t tile, R& registers) {
      combine(tile, registers, out);
    });
  }

 private:
  /// silu(gate) * up of the choice's rows, for 32 features.
  void activate(const Choice<float>& choice, int64_t tile, PassRegisters& registers) const {
    const int64_t rows = choice.rows.size(), expert = choice.expert, up = down_.inputs / kFeatures;
    const float* scales = gate_up_.scales + expert * gate_up_.features + tile * kFeatures;
    std::vector<float> gates(rows * kFeatures);
    const uint8_t* tiles = gate_up_.tile(expert, tile);
    products(inputs_, choice, tiles, registers, [&](int64_t row, const int32_t* sums) {
      for (int f = 0; f < kFeatures; ++f) {
        gates[row * kFeatures + f] = inputs_.value(choice.first_slot + row, sums[f], scales[f]);
      }
    });
    scales += down_.inputs;
    const uint8_t* ups = gate_up_.tile(expert, tile + up);
    products(inputs_, choice, ups, registers, [&](int64_t row, const int32_t* sums) {
      const int64_t slot = choice.first_slot + row;
      float* active = active_.get() + slot * down_.inputs + tile * kFeatures;
      for (int f = 0; f < kFeatures; ++f) {
        const float gate = gates[row * kFeatures + f];
        active[f] = swiglu<float>(gate, inputs_.value(slot, sums[f], scales[f]), limit_);
      }
    });
  }

  /// 32 output features of all rows: the weighted sum over experts, in index order.
  void combine(int64_t tile, PassRegisters& registers, const Tensor& out) const {
    const int64_t begin = tile * kFeatures, tokens = out.size(0);
    const int64_t count = std::min<int64_t>(kFeatures, down_.features - begin);
    std::vector<float> total(tokens * kFeatures);
    for (const Choice<float>& choice : choices_.chosen) {
      const float* scales = down_.scales + choice.expert * down_.features + begin;
      const uint8_t* weights = down_.tile(choice.expert, tile);
      products(rounded_, choice, weights, registers, [&](int64_t row, const int32_t* sums) {
        float* to = total.data() + choice.rows[row] * kFeatures;
        for (int64_t f = 0; f < count; ++f) {
          to[f] += choice.weights[row] *
              rounded_.value(choice.first_slot + row, sums[f], scales[f]);
        }
      });
    }
    for (int64_t row = 0; row < tokens; ++row) {
      write(out, row * down_.features + begin, total.data() + row * kFeatures, count);
    }
  }

  template <class Body>
  static void products(const Int8Rows& rows, const Choice<float>& choice, const uint8_t* tile,
                       PassRegisters& registers, const Body& body) {
    const InputRows x = dense_rows(rows.row(choice.first_slot), rows.row(1) - rows.row(0));
    for_products<Int8Quads>(x, choice.rows.size(), tile, registers, body);
  }

  const Stack gate_up_;
  const Stack down_;
  const Choices<float> choices_;
  const Limit limit_;
  Int8Rows inputs_;        // [slots, hidden]
  Buffer<float> active_;   // [slots, intermediate]
  Int8Rows rounded_;       // the same, rounded
};

Stack stack_of(const Tensor& weight, const Tensor& scales, const char* name) {
  STD_TORCH_CHECK(
      weight.dim() == 5 && weight.is_contiguous() && weight.scalar_type() == ScalarType::Byte &&
          weight.size(3) == kFeatures && weight.size(4) == 4 && scales.dim() == 2 &&
          scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
          scales.size(0) == weight.size(0) && count_tiles(scales.size(1)) == weight.size(1),
      "mtpc_cpu::quantised_experts: expected ", name,
      " uint8 [E, ceil(N / 32), K / 4, 32, 4] and its scales float32 [E, N]");
  return {static_cast<const uint8_t*>(weight.const_data_ptr()),
          static_cast<const float*>(scales.const_data_ptr()), 4 * weight.size(2), scales.size(1)};
}

}  // namespace

MTPC_OPERATOR Tensor quantised_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales, const Tensor& down,
    const Tensor& down_scales, const Tensor& expert_ids, const Tensor& expert_weights,
    double limit, bool limit_input, const std::optional<Tensor>& rows) {
  const Stack wide = stack_of(gate_up, gate_up_scales, "gate_up");
  const Stack narrow = stack_of(down, down_scales, "down");
  STD_TORCH_CHECK(
      x.dim() == 2 && wide.inputs == x.size(1) && narrow.features == x.size(1) &&
          narrow.inputs % kFeatures == 0 && wide.features == 2 * narrow.inputs &&
          gate_up.size(0) == down.size(0),
      "mtpc_cpu::quantised_experts: gate_up [E, 2I, H] and down [E, H, I], I a multiple of 32, do "
      "not fit x [T, H]");
  STD_TORCH_CHECK(
      expert_ids.dim() == 2 && expert_weights.dim() == 2 && expert_ids.size(0) == x.size(0) &&
          expert_weights.size(0) == x.size(0) && expert_weights.size(1) == expert_ids.size(1),
      "mtpc_cpu::quantised_experts: expert_ids and expert_weights must be [T, k]");
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const Tensor out = dense_empty(dense, {x.size(0), x.size(1)});
  const int64_t used = used_rows(rows, x.size(0));
  Choices<float> choices =
      group_rows<float>(expert_ids, adjacent_last(expert_weights), down.size(0), used);
  QuantisedExperts(dense, wide, narrow, std::move(choices), used, {limit, limit_input}).run(out);
  return out;
}

}  // namespace mtpc
