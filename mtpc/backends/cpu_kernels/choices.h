// Which rows chose which experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "product_rows.h"

namespace mtpc {

/// The rows that chose one expert, in order, and its weight in each.
template <class A>
struct Choice {
  int64_t expert;
  std::vector<int64_t> rows;
  std::vector<A> weights;
  int64_t first_slot = 0;  // of its rows among the rows of all choices
};

/// The experts that some row chose, in index order.
template <class A>
struct Choices {
  std::vector<Choice<A>> chosen;
  int64_t slots = 0;
};

inline void check_choices(
    const char* name, const Tensor& ids, const Tensor& weights, int64_t tokens) {
  STD_TORCH_CHECK(
      ids.dim() == 2 && weights.dim() == 2 && ids.size(0) == tokens && weights.size(0) == tokens &&
          weights.size(1) == ids.size(1),
      "mtpc_cpu::", name, ": expert_ids and expert_weights must be [T, k]");
}

/// Groups the first rows by expert. Ids outside the table choose nothing; weights are rounded to T.
template <class T>
Choices<Accumulator<T>> group_rows(
    const Tensor& expert_ids, const Tensor& expert_weights, int64_t experts, int64_t rows) {
  using A = Accumulator<T>;
  const Indices ids(expert_ids, "expert_ids", 2);
  const int64_t choices = expert_ids.size(1);
  std::vector<Choice<A>> all(experts);
  std::vector<A> weights(choices);
  for (int64_t row = 0; row < rows; ++row) {
    read(weights.data(), expert_weights, row * expert_weights.stride(0), choices);
    for (int64_t k = 0; k < choices; ++k) {
      const int64_t expert = ids(row, k);
      if (expert < 0 || expert >= experts) continue;
      all[expert].rows.push_back(row);
      all[expert].weights.push_back(static_cast<A>(static_cast<T>(weights[k])));
    }
  }
  Choices<A> result;
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (all[expert].rows.empty()) continue;
    all[expert].expert = expert;
    all[expert].first_slot = result.slots;
    result.slots += all[expert].rows.size();
    result.chosen.push_back(std::move(all[expert]));
  }
  return result;
}

/// What bounds gate (silu(gate), or gate itself) from above and up on both sides; 0 is off.
/// With `gelu`, gelu(gate) stands in place of silu(gate).
struct Limit {
  double value;
  bool of_input;
  bool gelu;
};

/// silu(2 sqrt(2 / pi) (x + 0.044715 x^3)) by x is gelu(x) in its tanh form.
template <class A>
A gelu_input(A x) {
  return A(1.5957691216057308) * (x + A(0.044715) * x * x * x);
}

template <class A>
A swiglu(A gate, A up, Limit limit) {
  const A most = static_cast<A>(limit.value);
  if (limit.value > 0) up = std::clamp(up, -most, most);
  if (limit.value > 0 && limit.of_input) gate = std::min(gate, most);
  gate = gate / (1 + std::exp(-(limit.gelu ? gelu_input(gate) : gate)));
  return (limit.value > 0 && !limit.of_input ? std::min(gate, most) : gate) * up;
}

/// (up + 1) gate sigmoid(alpha gate); the limit bounds gate from above, and up on both sides.
struct ClampedGate {
  float limit, alpha;

  float operator()(float gate, float up) const {
    gate = std::min(gate, limit);
    return (std::clamp(up, -limit, limit) + 1) * (gate / (1 + std::exp(-alpha * gate)));
  }
};

/// `swiglu` of so many rows, for 32 features. gates(body) and ups(body) call body(row, its 32
/// sums) for each row; rows of `out` are `stride` apart.
template <class T, class Gates, class Ups>
void activate_tile(int64_t rows, const Gates& gates, const Ups& ups, Limit limit, T* out,
                   int64_t stride) {
  std::vector<float> held(rows * kFeatures);
  gates([&](int64_t row, const float* sums) {
    std::copy_n(sums, kFeatures, held.data() + row * kFeatures);
  });
  ups([&](int64_t row, const float* sums) {
    const float* gate = held.data() + row * kFeatures;
    for (int f = 0; f < kFeatures; ++f) {
      out[row * stride + f] = static_cast<T>(swiglu<float>(gate[f], sums[f], limit));
    }
  });
}

/// 32 features of all rows, [tokens, 32]: the weighted sum over experts, in index order.
/// products(choice, body) calls body(i, its 32 sums) for each of the choice's rows.
template <class Products>
std::vector<float> combine_tile(
    const Choices<float>& choices, int64_t tokens, const Products& products) {
  std::vector<float> total(tokens * kFeatures);
  for (const Choice<float>& choice : choices.chosen) {
    products(choice, [&](int64_t i, const float* sums) {
      float* to = total.data() + choice.rows[i] * kFeatures;
      for (int f = 0; f < kFeatures; ++f) to[f] += choice.weights[i] * sums[f];
    });
  }
  return total;
}

}  // namespace mtpc
