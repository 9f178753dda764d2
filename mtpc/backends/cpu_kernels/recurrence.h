// Recurrences over flat rows, with state that rolls back; see mtpc/ops/recurrence.py.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "tensors.h"

namespace mtpc {

/// Sizes of a call, in the letters of the references.
struct RecurrentSizes {
  int64_t tokens, requests, slots;
  int64_t heads, key_dim, value_dim;  // HV, and a state matrix [Dk, Dv] for each
  int64_t inputs;                     // values of a row
  int64_t channels, width, kept;      // C, W, B

  int64_t state() const { return key_dim * value_dim; }
};

/// The state of all request slots; written.
struct RecurrentState {
  const Tensor &recurrent, &history, &standing;
};

/// Which rows belong to which request.
struct RecurrentRows {
  const Tensor &state_slots, &seq_lens, &query_start_loc, &certain_lens;
};

/// What a request brings to a step: its rows, and where its state stands.
struct RecurrentRequest {
  int64_t slot, first, count;  // rows first .. first + count - 1
  int64_t committed, stood, certain;
  bool on;
};

/// SiLU of a register of T's values, rounded before and after, as two operators round.
template <class T, class A>
Vec<A> rounded_silu(Vec<A> x) {
  x = rounded<T, A>(x);
  return rounded<T, A>(x / (1 + exp(-x)));
}

/// x <- change(x, at), register by register; at(p) are the same elements of p. The last register has
/// zeros behind the end.
template <class A, class Change>
void each_register(std::vector<A>& x, const Change& change) {
  const int64_t count = static_cast<int64_t>(x.size()), full = count / kLanes<A> * kLanes<A>;
  for (int64_t i = 0; i < full; i += kLanes<A>) {
    const auto at = [&](const auto* p) { return load<A>(p + i); };
    store<A>(x.data() + i, change(at(x.data()), at));
  }
  if (full == count) return;
  const auto at = [&](const auto* p) { return load_first<A>(p + full, count - full); };
  const Vec<A> last = change(at(x.data()), at);
  std::memcpy(x.data() + full, &last, (count - full) * sizeof(A));
}

template <class A>
A softplus(A x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}

/// Elements of a small weight, in the accumulation type.
template <class A>
std::vector<A> widened(const Tensor& t) {
  const Tensor dense = as_dense(t);
  std::vector<A> out(t.numel());
  read(out.data(), dense, 0, t.numel());
  return out;
}

/// The convolution, and the order of positions. A rule derives from it and has
/// - `Row`, one position as one head takes it, made of the sizes;
/// - `prepare(request, position, head, row)`;
/// - `update(row, state)`, one function for rows that are replayed and rows that are new, so that
///   both give the same bits;
/// - `answer(row, state, out)`, the output of a position, of the state after it;
/// or a `run` of its own in place of the last two.
template <class T, class Rule>
class Recurrence {
 public:
  using A = Accumulator<T>;

  Recurrence(
      const RecurrentSizes& sizes, const Tensor& rows, const RecurrentState& state,
      const Tensor& conv_weight, std::vector<A> conv_bias)
      : s_(sizes), rows_(static_cast<const T*>(rows.const_data_ptr())),
        recurrent_(static_cast<A*>(state.recurrent.mutable_data_ptr())),
        history_(static_cast<T*>(state.history.mutable_data_ptr())),
        conv_(sizes.channels * sizes.width), conv_bias_(std::move(conv_bias)) {
    const std::vector<A> weight = widened<A>(conv_weight);
    // By a width that is known when this is compiled, the usual one is transposed by registers.
    s_.width == 4 ? transpose_conv<4>(weight.data()) : transpose_conv<0>(weight.data());
  }

  /// One head of one request: its outputs, and its state moved on.
  void run(const RecurrentRequest& request, int64_t head, T* out) const {
    const Rule& rule = *static_cast<const Rule*>(this);
    typename Rule::Row row(s_);
    std::vector<A> state(s_.state());
    A* kept = kept_state(request, head);
    // Zeros are a fresh request's state: what its slot holds is never read.
    if (request.stood > 0) std::copy(kept, kept + s_.state(), state.begin());
    for (int64_t position = request.stood; position < request.committed; ++position) {
      rule.prepare(request, position, head, row);
      rule.update(row, state.data());
    }
    for (int64_t index = 0; index < request.count; ++index) {
      if (index == request.certain) std::copy(state.begin(), state.end(), kept);
      rule.prepare(request, request.committed + index, head, row);
      rule.update(row, state.data());
      rule.answer(
          row, state.data(), out + ((request.first + index) * s_.heads + head) * s_.value_dim);
    }
    if (request.certain >= request.count) std::copy(state.begin(), state.end(), kept);
  }

  /// Keeps the inputs of a request's last positions, once all its heads have run.
  void remember(const RecurrentRequest& request) const {
    for (int64_t i = std::max<int64_t>(request.count - s_.kept, 0); i < request.count; ++i) {
      const T* source = rows_ + (request.first + i) * s_.inputs;
      std::copy(source, source + s_.inputs, entry(request, request.committed + i));
    }
  }

 protected:
  /// The state of a head of a request, at the position where it stands.
  A* kept_state(const RecurrentRequest& request, int64_t head) const {
    return recurrent_ + (request.slot * s_.heads + head) * s_.state();
  }

  /// The inputs of a position: of this step's rows, or kept.
  const T* inputs(const RecurrentRequest& request, int64_t position) const {
    return position < request.committed
        ? entry(request, position)
        : rows_ + (request.first + position - request.committed) * s_.inputs;
  }

  /// Channels `first` on of the causal convolution with SiLU, rounded as two ops are.
  void convolve(const RecurrentRequest& request, int64_t position, int64_t first,
                std::vector<A>& out) const {
    std::fill(out.begin(), out.end(), A{0});
    for (int64_t back = std::min(s_.width - 1, position); back >= 0; --back) {
      const T* x = inputs(request, position - back) + first;
      const A* weight = conv_.data() + (s_.width - 1 - back) * s_.channels + first;
      each_register(out, [&](Vec<A> sum, auto at) { return sum + at(x) * at(weight); });
    }
    const A* bias = conv_bias_.empty() ? nullptr : conv_bias_.data() + first;
    each_register(out, [&](Vec<A> sum, auto at) {
      return rounded_silu<T, A>(bias ? sum + at(bias) : sum);
    });
  }

  /// out <- key^T state, over the key dimension.
  void read_state(const std::vector<A>& key, const A* state, std::vector<A>& out) const {
    std::fill(out.begin(), out.end(), A{0});
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      const A* line = state + k * s_.value_dim;
      for (int64_t v = 0; v < s_.value_dim; ++v) out[v] += line[v] * key[k];
    }
  }

  const RecurrentSizes s_;

 private:
  /// [C, W] -> [W, C]; kWidth is W, or 0.
  template <int kWidth>
  void transpose_conv(const A* weight) {
    const int64_t width = kWidth ? kWidth : s_.width;
    for (int64_t w = 0; w < width; ++w) {
      for (int64_t c = 0; c < s_.channels; ++c) conv_[w * s_.channels + c] = weight[c * width + w];
    }
  }

  T* entry(const RecurrentRequest& request, int64_t position) const {
    return history_ + (request.slot * s_.kept + position % s_.kept) * s_.inputs;
  }

  const T* rows_;
  A* recurrent_;
  T* history_;
  std::vector<A> conv_, conv_bias_;  // conv_ is [W, C]
};

/// Sizes of tensors with the right numbers of dimensions; the state must fit the rows.
inline RecurrentSizes recurrent_sizes(
    const char* name, const Tensor& rows, const Tensor& conv_weight, const RecurrentState& state) {
  const auto& [recurrent, history, standing] = state;
  STD_TORCH_CHECK(
      rows.dim() == 2 && conv_weight.dim() == 2 && recurrent.dim() == 4 && history.dim() == 3 &&
          standing.dim() == 1,
      "mtpc_cpu::", name, ": expected rows [T, ...], conv_weight [C, W], recurrent "
      "[S, HV, Dk, Dv], history [S, B, ...], standing [S]");
  const RecurrentSizes s{
      rows.size(0), 0, recurrent.size(0), recurrent.size(1), recurrent.size(2), recurrent.size(3),
      rows.size(1), conv_weight.size(0), conv_weight.size(1), history.size(1)};
  STD_TORCH_CHECK(
      history.size(2) == s.inputs && history.size(0) == s.slots && standing.size(0) == s.slots,
      "mtpc_cpu::", name, ": history and standing do not fit rows and recurrent; see mtpc/ops");
  STD_TORCH_CHECK(
      recurrent.is_contiguous() && history.is_contiguous() && standing.is_contiguous(),
      "mtpc_cpu::", name, ": state must be contiguous");
  const bool wide = rows.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(
      history.scalar_type() == rows.scalar_type() &&
          recurrent.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float) &&
          standing.scalar_type() == ScalarType::Int,
      "mtpc_cpu::", name, ": history must have rows' dtype, recurrent be float32 (float64 for "
      "float64 rows), standing int32");
  return s;
}

inline std::vector<RecurrentRequest> recurrent_requests(
    const char* name, const RecurrentSizes& s, const int32_t* standing, const RecurrentRows& at) {
  const Indices slots(at.state_slots, "state_slots", 1), seq_lens(at.seq_lens, "seq_lens", 1);
  const Indices starts(at.query_start_loc, "query_start_loc", 1);
  const Indices certain_lens(at.certain_lens, "certain_lens", 1);
  std::vector<RecurrentRequest> out(s.requests);
  for (int64_t r = 0; r < s.requests; ++r) {
    RecurrentRequest& request = out[r];
    request.on = seq_lens(r) > 0;
    if (!request.on) continue;
    request.slot = slots(r), request.first = starts(r), request.count = starts(r + 1) - starts(r);
    request.committed = seq_lens(r) - request.count;
    STD_TORCH_CHECK(
        request.slot > 0 && request.slot < s.slots && request.first >= 0 && request.count >= 0 &&
            request.first + request.count <= s.tokens && request.committed >= 0,
        "mtpc_cpu::", name, ": request ", r, " has slot ", request.slot, " of ", s.slots,
        ", rows ", request.first, " to ", request.first + request.count, " of ", s.tokens,
        ", length ", seq_lens(r));
    request.certain = std::min(certain_lens(r), request.count);
    request.stood = request.committed > 0 ? standing[request.slot] : 0;
    STD_TORCH_CHECK(
        request.stood >= 0 && request.stood <= request.committed &&
            request.committed - request.stood <= s.kept - (s.width - 1),
        "mtpc_cpu::", name, ": slot ", request.slot, " stands at ", request.stood, " of ",
        request.committed, " positions; ", s.kept - (s.width - 1), " can be replayed");
  }
  return out;
}

/// Runs a recurrence over all requests and heads; returns [T, HV, Dv].
///
/// make(type, rows) gives the rule for rows [T, ...] of type::type that are contiguous.
template <class Make>
Tensor run_recurrence(const char* name, RecurrentSizes s, const Tensor& rows,
                      const RecurrentState& state, const RecurrentRows& at, const Make& make) {
  s.requests = at.seq_lens.size(0);
  int32_t* stood = static_cast<int32_t*>(state.standing.mutable_data_ptr());
  const std::vector<RecurrentRequest> all = recurrent_requests(name, s, stood, at);
  const Tensor dense = as_dense(rows);
  const Tensor out = dense_zeros(rows, {s.tokens, s.heads, s.value_dim});
  with_type(rows.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto rule = make(type, dense);
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const int64_t work = s.tokens * s.heads * s.state() * 4;
    run_tasks(s.requests * s.heads, worker_count(work), [&](int64_t task) {
      const RecurrentRequest& request = all[task / s.heads];
      if (request.on) rule.run(request, task % s.heads, target);
    });
    for (const RecurrentRequest& request : all) {
      if (!request.on) continue;
      rule.remember(request);
      stood[request.slot] = static_cast<int32_t>(request.committed + request.certain);
    }
  });
  return out;
}

}  // namespace mtpc
