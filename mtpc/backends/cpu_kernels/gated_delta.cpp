// The gated delta rule over flat rows, with state that rolls back; see mtpc/ops/gated_delta.py.
#include "operators.h"
#include "recurrence.h"

namespace mtpc {
namespace {

template <class T>
class GatedDelta : public Recurrence<T, GatedDelta<T>> {
  using Base = Recurrence<T, GatedDelta<T>>;
  using A = typename Base::A;
  using Base::s_;

 public:
  /// One position as one value head takes it.
  struct Row {
    explicit Row(const RecurrentSizes& s)
        : query(s.key_dim), key(s.key_dim), value(s.value_dim), sums(s.value_dim) {}

    std::vector<A> query, key, value, sums;
    A decay = 0, beta = 0;
  };

  GatedDelta(
      const RecurrentSizes& sizes, int64_t key_heads, const Tensor& rows,
      const RecurrentState& state, const Tensor& conv_weight, const Tensor& a_log,
      const Tensor& dt_bias)
      : Base(sizes, rows, state, conv_weight, {}), key_heads_(key_heads),
        rate_(widened<A>(a_log)), bias_(widened<A>(dt_bias)) {
    for (A& rate : rate_) rate = std::exp(rate);
  }

  void prepare(const RecurrentRequest& request, int64_t position, int64_t head, Row& row) const {
    const int64_t key_head = head / (s_.heads / key_heads_);
    const int64_t keys = key_heads_ * s_.key_dim, offset = key_head * s_.key_dim;
    this->convolve(request, position, offset, row.query);
    this->convolve(request, position, keys + offset, row.key);
    this->convolve(request, position, 2 * keys + head * s_.value_dim, row.value);
    normalise(row.query, 1 / std::sqrt(static_cast<A>(s_.key_dim)));
    normalise(row.key, 1);
    const T* gates = this->inputs(request, position) + s_.channels + head;
    const A b = static_cast<A>(gates[0]), a = static_cast<A>(gates[s_.heads]);
    row.beta = static_cast<A>(static_cast<T>(1 / (1 + std::exp(-b))));
    row.decay = std::exp(-rate_[head] * softplus(a + bias_[head]));
  }

  /// state <- decay state; state <- state + key (beta (value - key state))^T.
  void update(Row& row, A* state) const {
    std::fill(row.sums.begin(), row.sums.end(), A{0});
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      A* line = state + k * s_.value_dim;
      const A key = row.key[k];
      for (int64_t v = 0; v < s_.value_dim; ++v) {
        line[v] *= row.decay;
        row.sums[v] += line[v] * key;
      }
    }
    for (int64_t v = 0; v < s_.value_dim; ++v) {
      row.sums[v] = (row.value[v] - row.sums[v]) * row.beta;
    }
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      A* line = state + k * s_.value_dim;
      const A key = row.key[k];
      for (int64_t v = 0; v < s_.value_dim; ++v) line[v] += key * row.sums[v];
    }
  }

  void answer(Row& row, const A* state, T* out) const {
    this->read_state(row.query, state, row.sums);
    for (int64_t v = 0; v < s_.value_dim; ++v) out[v] = static_cast<T>(row.sums[v]);
  }

 private:
  static void normalise(std::vector<A>& x, A scale) {
    A sum = 0;
    for (const A value : x) sum += value * value;
    const A factor = 1 / std::sqrt(sum + static_cast<A>(1e-6));
    for (A& value : x) value = value * factor * scale;
  }

  const int64_t key_heads_;
  std::vector<A> rate_, bias_;
};

}  // namespace

MTPC_OPERATOR Tensor gated_delta_rule(
    const Tensor& rows, const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
    const Tensor& recurrent, const Tensor& history, const Tensor& standing,
    const Tensor& state_slots, const Tensor& seq_lens, const Tensor& query_start_loc,
    const Tensor& certain_lens) {
  constexpr const char* kName = "gated_delta_rule";
  const RecurrentState state{recurrent, history, standing};
  const RecurrentSizes s = recurrent_sizes(kName, rows, conv_weight, state);
  const int64_t key_heads = (s.channels - s.heads * s.value_dim) / (2 * s.key_dim);
  STD_TORCH_CHECK(
      key_heads > 0 && s.heads % key_heads == 0 &&
          s.channels == 2 * key_heads * s.key_dim + s.heads * s.value_dim &&
          s.inputs == s.channels + 2 * s.heads && a_log.numel() == s.heads &&
          dt_bias.numel() == s.heads,
      "mtpc_cpu::gated_delta_rule: sizes do not fit each other; see mtpc/ops/gated_delta.py");
  const RecurrentRows at{state_slots, seq_lens, query_start_loc, certain_lens};
  return run_recurrence(kName, s, rows, state, at, [&](auto type, const Tensor& dense) {
    using T = typename decltype(type)::type;
    return GatedDelta<T>(s, key_heads, dense, state, conv_weight, a_log, dt_bias);
  });
}

}  // namespace mtpc
