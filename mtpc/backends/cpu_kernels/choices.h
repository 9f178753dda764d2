// Which rows chose which experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tensors.h"

namespace mtpc {

/// The rows that chose one expert, in order, and its weight in each.
template <class A>
struct Choice {
  int64_t expert;
  std::vector<int64_t> rows;
  std::vector<A> weights;
  int64_t first_slot = 0;  // of its rows among the rows of all choices
};

/// The experts that anybody chose, in index order.
template <class A>
struct Choices {
  std::vector<Choice<A>> chosen;
  int64_t slots = 0;
};

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
struct Limit {
  double value;
  bool of_input;
};

template <class A>
A swiglu(A gate, A up, Limit limit) {
  const A most = static_cast<A>(limit.value);
  if (limit.value > 0) up = std::clamp(up, -most, most);
  if (limit.value > 0 && limit.of_input) gate = std::min(gate, most);
  gate = gate / (1 + std::exp(-gate));
  return (limit.value > 0 && !limit.of_input ? std::min(gate, most) : gate) * up;
}

}  // namespace mtpc
