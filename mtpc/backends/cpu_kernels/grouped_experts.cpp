// Mixture of experts on packed codes of 4 or 8 bits: every chosen expert's are read once.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "choices.h"
#include "grouped_products.h"
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// What gpt-oss's experts have: biases [experts, features], and gate and up features in turns.
struct Biased {
  Tensor wide, narrow;
  ClampedGate gate;
};

class GroupedExperts {
 public:
  GroupedExperts(const Tensor& x, const GroupedWeight& gate_up, const GroupedWeight& down,
                 int64_t experts, Choices<float> choices, int64_t used, Limit limit,
                 std::optional<Biased> biased)
      : gate_up_(gate_up),
        down_(down),
        wide_tiles_(gate_up.tiles / experts),
        narrow_tiles_(down.tiles / experts),
        choices_(std::move(choices)),
        limit_(limit),
        biased_(std::move(biased)),
        inputs_(choices_.slots, gate_up.form),
        active_(choices_.slots * down.form.inputs),
        rounded_(choices_.slots, down.form) {
    const GroupedRows rows(used, gate_up.form);
    set_rows(rows, x, used);
    for (const Choice<float>& choice : choices_.chosen) {
      for (size_t i = 0; i < choice.rows.size(); ++i) {
        inputs_.copy(choice.first_slot + i, rows, choice.rows[i]);
      }
    }
  }

  void run(const Tensor& out) {
    const int64_t experts = choices_.chosen.size(), width = down_.form.inputs;
    const int64_t gates = biased_ ? wide_tiles_ : width / kFeatures;
    // An instruction does twice the work that it does in bfloat16.
    const int64_t work = choices_.slots * gate_up_.form.inputs * width / 2;
    using R = PassRegisters;
    run_tasks<R>(experts * gates, worker_count(2 * work), [&](int64_t task, R& registers) {
      const Choice<float>& choice = choices_.chosen[task / gates];
      biased_ ? activate_pairs(choice, task % gates, registers)
              : activate(choice, task % gates, registers);
    });
    run_tasks(choices_.slots, worker_count(8 * choices_.slots * width), [&](int64_t slot) {
      rounded_.set(slot, active_.get() + slot * width);
    });
    run_tasks<R>(narrow_tiles_, worker_count(work), [&](int64_t tile, R& registers) {
      combine(tile, registers, out);
    });
  }

 private:
  /// `swiglu` of the choice's rows, for 32 features.
  void activate(const Choice<float>& choice, int64_t tile, PassRegisters& registers) const {
    const int64_t rows = choice.rows.size(), width = down_.form.inputs;
    const int64_t gate_tile = choice.expert * wide_tiles_ + tile;
    const auto products_of = [&](int64_t at) {
      return [&, at](const auto& body) {
        for_grouped_products(
            inputs_, choice.first_slot, rows, gate_up_.from(at), registers, body);
      };
    };
    float* out = active_.get() + choice.first_slot * width + tile * kFeatures;
    activate_tile(rows, products_of(gate_tile), products_of(gate_tile + width / kFeatures), limit_,
                  out, width);
  }

  /// The same of 16 pairs of a gate and an up.
  void activate_pairs(const Choice<float>& choice, int64_t tile, PassRegisters& registers) const {
    constexpr int kPairs = kFeatures / 2;
    const int64_t width = down_.form.inputs, at = choice.expert * wide_tiles_ + tile;
    float bias[kFeatures];
    read(bias, biased_->wide, at * kFeatures, kFeatures);
    float* out = active_.get() + choice.first_slot * width + tile * kPairs;
    const auto put = [&](int64_t row, const float* sums) {
      for (int f = 0; f < kPairs; ++f) {
        const int gate = 2 * f, up = gate + 1;
        out[row * width + f] = biased_->gate(sums[gate] + bias[gate], sums[up] + bias[up]);
      }
    };
    for_grouped_products(inputs_, choice.first_slot, choice.rows.size(), gate_up_.from(at),
                         registers, put);
  }

  /// 32 output features of all rows: the weighted sum over experts, in index order.
  void combine(int64_t tile, PassRegisters& registers, const Tensor& out) const {
    const int64_t begin = tile * kFeatures, tokens = out.size(0), features = out.size(1);
    const int64_t count = std::min<int64_t>(kFeatures, features - begin);
    const auto products = [&](const Choice<float>& choice, const auto& body) {
      float bias[kFeatures] = {};
      if (biased_) read(bias, biased_->narrow, choice.expert * features + begin, count);
      const auto add_bias = [&](int64_t row, float* sums) {
        if (biased_) std::transform(sums, sums + kFeatures, bias, sums, std::plus<float>());
        body(row, sums);
      };
      for_grouped_products(
          rounded_, choice.first_slot, choice.rows.size(),
          down_.from(choice.expert * narrow_tiles_ + tile), registers, add_bias);
    };
    const std::vector<float> total = combine_tile(choices_, tokens, products);
    for (int64_t row = 0; row < tokens; ++row) {
      write(out, row * features + begin, total.data() + row * kFeatures, count);
    }
  }

  const GroupedWeight gate_up_, down_;
  const int64_t wide_tiles_, narrow_tiles_;  // of an expert
  const Choices<float> choices_;
  const Limit limit_;
  const std::optional<Biased> biased_;
  GroupedRows inputs_;    // [slots, hidden]
  Buffer<float> active_;  // [slots, intermediate]
  GroupedRows rounded_;   // the same, as products take them
};

/// The operators' common part; `name` is the operator's.
Tensor run_experts(
    const char* name, const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales,
    const std::optional<Tensor>& gate_up_zeros, const Tensor& down, const Tensor& down_scales,
    const std::optional<Tensor>& down_zeros, const Tensor& expert_ids,
    const Tensor& expert_weights, const std::optional<Tensor>& rows, Limit limit,
    std::optional<Biased> biased) {
  STD_TORCH_CHECK(
      x.dim() == 2 && gate_up.dim() == 5 && down.dim() == 5 && gate_up.size(0) == down.size(0) &&
          down.size(0) > 0 && gate_up.size(1) % 2 == 0,
      "mtpc_cpu::", name, ": expected x [T, H] and packed stacks of one number of experts, "
      "gate's and up's features whole tiles each");
  const int64_t experts = down.size(0), features = gate_up.size(1) * kFeatures;
  const GroupedWeight wide =
      grouped_weight(name, gate_up, gate_up_scales, gate_up_zeros, experts, features, x.size(1));
  const GroupedWeight narrow =
      grouped_weight(name, down, down_scales, down_zeros, experts, x.size(1), features / 2);
  check_choices(name, expert_ids, expert_weights, x.size(0));
  if (biased) {
    const auto fits = [&](const Tensor& bias, int64_t width) {
      return bias.dim() == 2 && bias.size(0) == experts && bias.size(1) == width;
    };
    STD_TORCH_CHECK(fits(biased->wide, features) && fits(biased->narrow, x.size(1)), "mtpc_cpu::",
                    name, ": expected biases [", experts, ", ", features, "] and [", experts, ", ",
                    x.size(1), "]");
  }
  const Tensor dense = as_dense(x);
  const Tensor out = dense_empty(dense, {x.size(0), x.size(1)});
  const int64_t used = used_rows(rows, x.size(0));
  Choices<float> choices =
      group_rows<float>(expert_ids, adjacent_last(expert_weights), experts, used);
  GroupedExperts(dense, wide, narrow, experts, std::move(choices), used, limit, std::move(biased))
      .run(out);
  return out;
}

}  // namespace

MTPC_OPERATOR Tensor grouped_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales,
    const std::optional<Tensor>& gate_up_zeros, const Tensor& down, const Tensor& down_scales,
    const std::optional<Tensor>& down_zeros, const Tensor& expert_ids,
    const Tensor& expert_weights, double limit, bool limit_input, bool gelu,
    const std::optional<Tensor>& rows) {
  return run_experts(
      "grouped_experts", x, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros,
      expert_ids, expert_weights, rows, {limit, limit_input, gelu}, std::nullopt);
}

MTPC_OPERATOR Tensor grouped_biased_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales,
    const Tensor& gate_up_bias, const Tensor& down, const Tensor& down_scales,
    const Tensor& down_bias, const Tensor& expert_ids, const Tensor& expert_weights, double limit,
    double alpha, const std::optional<Tensor>& rows) {
  const ClampedGate gate{static_cast<float>(limit), static_cast<float>(alpha)};
  return run_experts(
      "grouped_biased_experts", x, gate_up, gate_up_scales, std::nullopt, down, down_scales,
      std::nullopt, expert_ids, expert_weights, rows, {},
      Biased{as_dense(gate_up_bias), as_dense(down_bias), gate});
}

}  // namespace mtpc
