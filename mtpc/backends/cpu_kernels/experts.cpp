// Mixture of experts: every chosen expert's weights are read once, whatever the number of rows.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "choices.h"
#include "dots.h"
#include "operators.h"
#include "simd.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Features that one task computes; a few kilobytes of weight rows at a time stay in cache.
constexpr int64_t kBlock = 32;

struct Shape {
  int64_t tokens, hidden, experts, intermediate;
  Limit limit;
};

/// Experts with gates: silu(gate) * up. Without: relu(up)^2, and the first weight is up alone.
template <class T, bool kGated>
class Experts {
 public:
  Experts(const Shape& shape, const Tensor& x, const Tensor& gate_up, const Tensor& down,
          const Tensor& ids, const Tensor& weights)
      : s_(shape),
        x_(x),
        gate_up_(gate_up),
        down_(down),
        choices_(group_rows<T>(ids, weights, shape.experts, ids.size(0))),
        active_(choices_.slots * shape.intermediate) {}

  void run(const Tensor& out) {
    const int64_t work = choices_.slots * s_.hidden * s_.intermediate;
    run_blocks(s_.intermediate, choices_.chosen.size(), work * 2, [&](int64_t choice, int64_t begin) {
      activate(choices_.chosen[choice], begin, std::min(begin + kBlock, s_.intermediate));
    });
    T* result = static_cast<T*>(out.mutable_data_ptr());
    run_blocks(s_.hidden, 1, work, [&](int64_t, int64_t begin) {
      combine(begin, std::min(begin + kBlock, s_.hidden), result);
    });
  }

 private:
  using A = Accumulator<T>;

  /// body(group, first feature) for every block of every group, on all threads.
  template <class Body>
  static void run_blocks(int64_t features, int64_t groups, int64_t work, const Body& body) {
    const int64_t blocks = (features + kBlock - 1) / kBlock;
    run_tasks(blocks * groups, worker_count(work), [&](int64_t task) {
      body(task / blocks, task % blocks * kBlock);
    });
  }

  const T* matrix(const Tensor& stacked, int64_t expert) const {
    return static_cast<const T*>(stacked.const_data_ptr()) + expert * stacked.stride(0);
  }

  static A relu2(A up) { return up > 0 ? up * up : A{0}; }

  T* slot(const Choice<A>& choice, int64_t i) const {
    return active_.get() + (choice.first_slot + i) * s_.intermediate;
  }

  /// The activation of one expert's rows, for intermediate features [begin, end).
  void activate(const Choice<A>& choice, int64_t begin, int64_t end) const {
    const T* gate = matrix(gate_up_, choice.expert);
    const T* up = kGated ? gate + s_.intermediate * gate_up_.stride(1) : gate;
    std::vector<const T*> inputs;
    for (const int64_t row : choice.rows) {
      inputs.push_back(static_cast<const T*>(x_.const_data_ptr()) + row * x_.stride(0));
    }
    for (int64_t feature = begin; feature < end; feature += kTile) {
      const WeightRows<T> gates(gate, gate_up_.stride(1), feature, end);
      const WeightRows<T> ups(up, gate_up_.stride(1), feature, end);
      const int64_t count = std::min<int64_t>(kTile, end - feature);
      for_input_tiles(inputs.size(), [&](auto tile, int64_t first) {
        constexpr int kInputs = decltype(tile)::value;
        A g[kTile][kInputs], u[kTile][kInputs];
        if constexpr (kGated) dot_tile<kInputs>(gates, inputs.data() + first, s_.hidden, g);
        dot_tile<kInputs>(ups, inputs.data() + first, s_.hidden, u);
        for (int i = 0; i < kInputs; ++i) {
          T* active = slot(choice, first + i) + feature;
          for (int64_t w = 0; w < count; ++w) {
            const A result = kGated ? swiglu<A>(g[w][i], u[w][i], s_.limit) : relu2(u[w][i]);
            active[w] = static_cast<T>(result);
          }
        }
      });
    }
  }

  /// Output features [begin, end) of all rows: the weighted sum over experts, in index order.
  void combine(int64_t begin, int64_t end, T* out) const {
    std::vector<A> sums(s_.tokens * kBlock);
    for (const Choice<A>& choice : choices_.chosen) add_expert(choice, begin, end, sums.data());
    for (int64_t row = 0; row < s_.tokens; ++row) {
      for (int64_t feature = begin; feature < end; ++feature) {
        out[row * s_.hidden + feature] = static_cast<T>(sums[row * kBlock + feature - begin]);
      }
    }
  }

  void add_expert(const Choice<A>& choice, int64_t begin, int64_t end, A* sums) const {
    std::vector<const T*> inputs;
    for (size_t i = 0; i < choice.rows.size(); ++i) inputs.push_back(slot(choice, i));
    for (int64_t feature = begin; feature < end; feature += kTile) {
      const WeightRows<T> rows(
          matrix(down_, choice.expert), down_.stride(1), feature, end);
      const int64_t count = std::min<int64_t>(kTile, end - feature);
      for_input_tiles(inputs.size(), [&](auto tile, int64_t first) {
        constexpr int kInputs = decltype(tile)::value;
        A y[kTile][kInputs];
        dot_tile<kInputs>(rows, inputs.data() + first, s_.intermediate, y);
        for (int i = 0; i < kInputs; ++i) {
          A* sum = sums + choice.rows[first + i] * kBlock + feature - begin;
          const A weight = choice.weights[first + i];
          for (int64_t w = 0; w < count; ++w) sum[w] += weight * y[w][i];
        }
      });
    }
  }

  const Shape s_;
  const Tensor& x_;
  const Tensor& gate_up_;
  const Tensor& down_;
  const Choices<A> choices_;
  Buffer<T> active_;  // [slots, intermediate]
};

Shape check(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
            const Tensor& weights, Limit limit, int64_t parts) {
  STD_TORCH_CHECK(
      x.dim() == 2 && gate_up.dim() == 3 && down.dim() == 3,
      "mtpc_cpu::experts: expected x [T, H], gate_up [E, 2I, H], down [E, H, I]");
  const Shape s{x.size(0), x.size(1), down.size(0), down.size(2), limit};
  STD_TORCH_CHECK(
      gate_up.size(0) == s.experts && gate_up.size(1) == parts * s.intermediate &&
          gate_up.size(2) == s.hidden && down.size(1) == s.hidden,
      "mtpc_cpu::experts: gate_up [E, 2I, H] (up [E, I, H] without gates) and down [E, H, I] do "
      "not fit x [T, H]");
  check_choices("experts", ids, weights, s.tokens);
  STD_TORCH_CHECK(
      x.scalar_type() == gate_up.scalar_type() && x.scalar_type() == down.scalar_type(),
      "mtpc_cpu::experts: x, gate_up and down differ in dtype");
  return s;
}

template <bool kGated>
Tensor run_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights, Limit limit) {
  const Shape shape =
      check(x, gate_up, down, expert_ids, expert_weights, limit, kGated ? 2 : 1);
  const Tensor out = dense_empty(x, {shape.tokens, shape.hidden});
  const Tensor inputs = adjacent_last(x), first = adjacent_last(gate_up);
  const Tensor second = adjacent_last(down), weights = adjacent_last(expert_weights);
  with_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    Experts<T, kGated>(shape, inputs, first, second, expert_ids, weights).run(out);
  });
  return out;
}

}  // namespace

MTPC_OPERATOR Tensor experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights, double limit, bool limit_input, bool gelu) {
  return run_experts<true>(
      x, gate_up, down, expert_ids, expert_weights, {limit, limit_input, gelu});
}

MTPC_OPERATOR Tensor relu2_experts(
    const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights) {
  return run_experts<false>(x, up, down, expert_ids, expert_weights, {0, false, false});
}

}  // namespace mtpc
