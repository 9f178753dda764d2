// Mamba-2's selective scan over flat rows, with state that rolls back; see mtpc/ops/mamba2.py.
#include "operators.h"
#include "recurrence.h"

namespace mtpc {
namespace {

/// Weights by head, and how heads share their keys.
struct ScanWeights {
  const Tensor& conv;
  const std::optional<Tensor>& conv_bias;
  const Tensor &a_log, &skip, &dt_bias;
  int64_t groups;
};

template <class T>
class Mamba2 : public Recurrence<T, Mamba2<T>> {
  using Base = Recurrence<T, Mamba2<T>>;
  using A = typename Base::A;
  using Base::s_;

 public:
  /// One position as one head takes it: b and c are key and query, x is the value.
  struct Row {
    explicit Row(const RecurrentSizes& s)
        : b(s.key_dim), c(s.key_dim), x(s.value_dim), sums(s.value_dim) {}

    std::vector<A> b, c, x, sums;
    A decay = 0, dt = 0, skip = 0;
  };

  Mamba2(const RecurrentSizes& sizes, const Tensor& rows, const RecurrentState& state,
         const ScanWeights& w)
      : Base(sizes, rows, state, w.conv,
             w.conv_bias ? widened<A>(*w.conv_bias) : std::vector<A>()),
        groups_(w.groups), rate_(widened<A>(w.a_log)), skip_(widened<A>(w.skip)),
        bias_(widened<A>(w.dt_bias)) {
    for (A& rate : rate_) rate = std::exp(rate);
  }

  void prepare(const RecurrentRequest& request, int64_t position, int64_t head, Row& row) const {
    const int64_t values = s_.heads * s_.value_dim, keys = groups_ * s_.key_dim;
    const int64_t offset = values + head / (s_.heads / groups_) * s_.key_dim;
    this->convolve(request, position, head * s_.value_dim, row.x);
    this->convolve(request, position, offset, row.b);
    this->convolve(request, position, offset + keys, row.c);
    const A dt = static_cast<A>(this->inputs(request, position)[s_.channels + head]);
    row.dt = softplus(dt + bias_[head]);
    row.decay = std::exp(-rate_[head] * row.dt);
    row.skip = skip_[head];
  }

  /// state <- decay state + b (dt x)^T.
  void update(Row& row, A* state) const {
    for (int64_t v = 0; v < s_.value_dim; ++v) row.sums[v] = row.x[v] * row.dt;
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      A* line = state + k * s_.value_dim;
      const A b = row.b[k];
      for (int64_t v = 0; v < s_.value_dim; ++v) line[v] = line[v] * row.decay + b * row.sums[v];
    }
  }

  void answer(Row& row, const A* state, T* out) const {
    this->read_state(row.c, state, row.sums);
    for (int64_t v = 0; v < s_.value_dim; ++v) {
      out[v] = static_cast<T>(row.sums[v] + row.x[v] * row.skip);
    }
  }

 private:
  const int64_t groups_;
  std::vector<A> rate_, skip_, bias_;
};

}  // namespace

MTPC_OPERATOR Tensor mamba2_scan(
    const Tensor& rows, const Tensor& conv_weight, const std::optional<Tensor>& conv_bias,
    const Tensor& a_log, const Tensor& skip, const Tensor& dt_bias, const Tensor& recurrent,
    const Tensor& history, const Tensor& standing, const Tensor& state_slots,
    const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& certain_lens,
    int64_t groups) {
  constexpr const char* kName = "mamba2_scan";
  const RecurrentState state{recurrent, history, standing};
  const RecurrentSizes s = recurrent_sizes(kName, rows, conv_weight, state);
  STD_TORCH_CHECK(
      groups > 0 && s.heads % groups == 0 &&
          s.channels == s.heads * s.value_dim + 2 * groups * s.key_dim &&
          s.inputs == s.channels + s.heads && a_log.numel() == s.heads &&
          skip.numel() == s.heads && dt_bias.numel() == s.heads &&
          (!conv_bias || conv_bias->numel() == s.channels),
      "mtpc_cpu::mamba2_scan: sizes do not fit each other; see mtpc/ops/mamba2.py");
  const ScanWeights weights{conv_weight, conv_bias, a_log, skip, dt_bias, groups};
  const RecurrentRows at{state_slots, seq_lens, query_start_loc, certain_lens};
  return run_recurrence(kName, s, rows, state, at, [&](auto type, const Tensor& dense) {
    return Mamba2<typename decltype(type)::type>(s, dense, state, weights);
  });
}

}  // namespace mtpc
