// The gated delta rule over flat rows, with state that rolls back; see mtpc/ops/gated_delta.py.
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Sizes of a call, in the letters of the reference.
struct Sizes {
  int64_t tokens, requests, slots;
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t channels, width, kept;  // C, W, B

  int64_t inputs() const { return channels + 2 * value_heads; }
  int64_t state() const { return key_dim * value_dim; }
};

/// What a request brings to a step: its rows, and where its state stands.
struct Request {
  int64_t slot, first, count;  // rows first .. first + count - 1
  int64_t committed, stood, certain;
  bool on;
};

template <class A>
A silu(A x) {
  return x / (1 + std::exp(-x));
}

template <class A>
A softplus(A x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}

/// Elements of a small weight, in the accumulation type.
template <class A>
std::vector<A> widened(const Tensor& t) {
  const Tensor dense = t.is_contiguous() ? t : torch::stable::contiguous(t);
  std::vector<A> out(t.numel());
  read(out.data(), dense, 0, t.numel());
  return out;
}

template <class T>
class GatedDelta {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;

 public:
  GatedDelta(
      const Sizes& sizes, const T* rows, const Tensor& conv_weight, const Tensor& a_log,
      const Tensor& dt_bias, A* recurrent, T* history)
      : s_(sizes), rows_(rows), recurrent_(recurrent), history_(history),
        rate_(widened<A>(a_log)), bias_(widened<A>(dt_bias)), conv_(sizes.channels * sizes.width) {
    const std::vector<A> weight = widened<A>(conv_weight);
    for (int64_t c = 0; c < s_.channels; ++c) {
      for (int64_t w = 0; w < s_.width; ++w) conv_[w * s_.channels + c] = weight[c * s_.width + w];
    }
    for (A& rate : rate_) rate = std::exp(rate);
  }

  /// One value head of one request: its outputs, and its state moved on.
  void run(const Request& request, int64_t head, T* out) const {
    Row row(s_);
    std::vector<A> state(s_.state());
    A* kept = recurrent_ + (request.slot * s_.value_heads + head) * s_.state();
    // Zeros are a fresh request's state: what its slot holds is never read.
    if (request.stood > 0) std::copy(kept, kept + s_.state(), state.begin());
    for (int64_t position = request.stood; position < request.committed; ++position) {
      prepare(request, position, head, row);
      update(row, state.data());
    }
    for (int64_t index = 0; index < request.count; ++index) {
      if (index == request.certain) std::copy(state.begin(), state.end(), kept);
      prepare(request, request.committed + index, head, row);
      update(row, state.data());
      T* target = out + ((request.first + index) * s_.value_heads + head) * s_.value_dim;
      answer(row, state.data(), target);
    }
    if (request.certain >= request.count) std::copy(state.begin(), state.end(), kept);
  }

  /// Keeps the inputs of a request's last positions, once all its heads have run.
  void remember(const Request& request) const {
    for (int64_t i = std::max<int64_t>(request.count - s_.kept, 0); i < request.count; ++i) {
      const T* source = rows_ + (request.first + i) * s_.inputs();
      std::copy(source, source + s_.inputs(), entry(request, request.committed + i));
    }
  }

 private:
  /// One position as one value head takes it.
  struct Row {
    explicit Row(const Sizes& s)
        : query(s.key_dim), key(s.key_dim), value(s.value_dim), sums(s.value_dim) {}

    std::vector<A> query, key, value, sums;
    A decay = 0, beta = 0;
  };

  T* entry(const Request& request, int64_t position) const {
    return history_ + (request.slot * s_.kept + position % s_.kept) * s_.inputs();
  }

  /// The inputs of a position: of this step's rows, or kept.
  const T* inputs(const Request& request, int64_t position) const {
    return position < request.committed
        ? entry(request, position)
        : rows_ + (request.first + position - request.committed) * s_.inputs();
  }

  void prepare(const Request& request, int64_t position, int64_t head, Row& row) const {
    const int64_t key_head = head / (s_.value_heads / s_.key_heads);
    const int64_t keys = s_.key_heads * s_.key_dim, offset = key_head * s_.key_dim;
    convolve(request, position, offset, row.query);
    convolve(request, position, keys + offset, row.key);
    convolve(request, position, 2 * keys + head * s_.value_dim, row.value);
    normalise(row.query, 1 / std::sqrt(static_cast<A>(s_.key_dim)));
    normalise(row.key, 1);
    const T* gates = inputs(request, position) + s_.channels + head;
    const A b = static_cast<A>(gates[0]), a = static_cast<A>(gates[s_.value_heads]);
    row.beta = static_cast<A>(static_cast<T>(1 / (1 + std::exp(-b))));
    row.decay = std::exp(-rate_[head] * softplus(a + bias_[head]));
  }

  /// Channels `first` on of the causal convolution with SiLU, rounded as two ops are.
  void convolve(
      const Request& request, int64_t position, int64_t first, std::vector<A>& out) const {
    std::fill(out.begin(), out.end(), A{0});
    for (int64_t w = 0; w < s_.width; ++w) {
      const int64_t there = position - (s_.width - 1) + w;
      if (there < 0) continue;
      const T* x = inputs(request, there) + first;
      const A* weight = conv_.data() + w * s_.channels + first;
      for (size_t i = 0; i < out.size(); ++i) out[i] += static_cast<A>(x[i]) * weight[i];
    }
    for (A& x : out) x = static_cast<A>(static_cast<T>(silu(static_cast<A>(static_cast<T>(x)))));
  }

  static void normalise(std::vector<A>& x, A scale) {
    A sum = 0;
    for (const A value : x) sum += value * value;
    const A factor = 1 / std::sqrt(sum + static_cast<A>(1e-6));
    for (A& value : x) value = value * factor * scale;
  }

  /// state <- decay state; state <- state + key (beta (value - key state))^T. One function for
  /// rows that are replayed and rows that are new, so that both give the same bits.
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
    std::fill(row.sums.begin(), row.sums.end(), A{0});
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      const A* line = state + k * s_.value_dim;
      const A query = row.query[k];
      for (int64_t v = 0; v < s_.value_dim; ++v) row.sums[v] += line[v] * query;
    }
    for (int64_t v = 0; v < s_.value_dim; ++v) out[v] = static_cast<T>(row.sums[v]);
  }

  const Sizes s_;
  const T* rows_;
  A* recurrent_;
  T* history_;
  std::vector<A> rate_, bias_, conv_;  // conv_ is [W, C]
};

Sizes check(
    const Tensor& rows, const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
    const Tensor& recurrent, const Tensor& history, const Tensor& standing) {
  STD_TORCH_CHECK(
      rows.dim() == 2 && conv_weight.dim() == 2 && a_log.dim() == 1 && dt_bias.dim() == 1 &&
          recurrent.dim() == 4 && history.dim() == 3 && standing.dim() == 1,
      "mtpc_cpu::gated_delta_rule: expected rows [T, C + 2 HV], conv_weight [C, W], a_log [HV], "
      "dt_bias [HV], recurrent [S, HV, Dk, Dv], history [S, B, C + 2 HV], standing [S]");
  Sizes s{};
  s.tokens = rows.size(0), s.slots = recurrent.size(0), s.value_heads = recurrent.size(1);
  s.key_dim = recurrent.size(2), s.value_dim = recurrent.size(3);
  s.channels = conv_weight.size(0), s.width = conv_weight.size(1), s.kept = history.size(1);
  s.key_heads = (s.channels - s.value_heads * s.value_dim) / (2 * s.key_dim);
  STD_TORCH_CHECK(
      s.key_heads > 0 && s.value_heads % s.key_heads == 0 &&
          s.channels == 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim &&
          rows.size(1) == s.inputs() && history.size(2) == s.inputs() &&
          history.size(0) == s.slots && standing.size(0) == s.slots &&
          a_log.size(0) == s.value_heads && dt_bias.size(0) == s.value_heads,
      "mtpc_cpu::gated_delta_rule: sizes do not fit each other; see mtpc/ops/gated_delta.py");
  STD_TORCH_CHECK(
      recurrent.is_contiguous() && history.is_contiguous() && standing.is_contiguous(),
      "mtpc_cpu::gated_delta_rule: state must be contiguous");
  const bool wide = rows.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(
      history.scalar_type() == rows.scalar_type() &&
          recurrent.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float) &&
          standing.scalar_type() == ScalarType::Int,
      "mtpc_cpu::gated_delta_rule: history must have rows' dtype, recurrent be float32 (float64 "
      "for float64 rows), standing int32");
  return s;
}

std::vector<Request> requests(
    const Sizes& s, const int32_t* standing, const Indices& slots, const Indices& seq_lens,
    const Indices& starts, const Indices& certain_lens) {
  std::vector<Request> out(s.requests);
  for (int64_t r = 0; r < s.requests; ++r) {
    Request& request = out[r];
    request.on = seq_lens(r) > 0;
    if (!request.on) continue;
    request.slot = slots(r), request.first = starts(r), request.count = starts(r + 1) - starts(r);
    request.committed = seq_lens(r) - request.count;
    STD_TORCH_CHECK(
        request.slot > 0 && request.slot < s.slots && request.first >= 0 && request.count >= 0 &&
            request.first + request.count <= s.tokens && request.committed >= 0,
        "mtpc_cpu::gated_delta_rule: request ", r, " has slot ", request.slot, " of ", s.slots,
        ", rows ", request.first, " to ", request.first + request.count, " of ", s.tokens,
        ", length ", seq_lens(r));
    request.certain = std::min(certain_lens(r), request.count);
    request.stood = request.committed > 0 ? standing[request.slot] : 0;
    STD_TORCH_CHECK(
        request.stood >= 0 && request.stood <= request.committed &&
            request.committed - request.stood <= s.kept - (s.width - 1),
        "mtpc_cpu::gated_delta_rule: slot ", request.slot, " stands at ", request.stood,
        " of ", request.committed, " positions; ", s.kept - (s.width - 1), " can be replayed");
  }
  return out;
}

}  // namespace

MTPC_OPERATOR Tensor gated_delta_rule(
    const Tensor& rows, const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
    const Tensor& recurrent, const Tensor& history, const Tensor& standing,
    const Tensor& state_slots, const Tensor& seq_lens, const Tensor& query_start_loc,
    const Tensor& certain_lens) {
  Sizes s = check(rows, conv_weight, a_log, dt_bias, recurrent, history, standing);
  s.requests = seq_lens.size(0);
  int32_t* stood = static_cast<int32_t*>(standing.mutable_data_ptr());
  const std::vector<Request> all = requests(
      s, stood, Indices(state_slots, "state_slots", 1), Indices(seq_lens, "seq_lens", 1),
      Indices(query_start_loc, "query_start_loc", 1), Indices(certain_lens, "certain_lens", 1));
  const Tensor dense = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  const Tensor out = dense_zeros(rows, {s.tokens, s.value_heads, s.value_dim});
  with_type(rows.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const GatedDelta<T> rule(
        s, static_cast<const T*>(dense.const_data_ptr()), conv_weight, a_log, dt_bias,
        static_cast<A*>(recurrent.mutable_data_ptr()), static_cast<T*>(history.mutable_data_ptr()));
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const int64_t work = s.tokens * s.value_heads * s.state() * 4;
    run_tasks(s.requests * s.value_heads, worker_count(work), [&](int64_t task) {
      const Request& request = all[task / s.value_heads];
      if (request.on) rule.run(request, task % s.value_heads, target);
    });
    for (const Request& request : all) {
      if (!request.on) continue;
      rule.remember(request);
      stood[request.slot] = static_cast<int32_t>(request.committed + request.certain);
    }
  });
  return out;
}

}  // namespace mtpc
