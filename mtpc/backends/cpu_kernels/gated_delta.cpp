// The gated delta rule over flat rows, with state that rolls back; see mtpc/ops/gated_delta.py.
//
// It goes position by position. A chunked form has more multiply-adds in float32 (90,000 per
// position and head of 128 x 128 in chunks of 64; this has 65,000), and its bits depend on where
// chunks begin. Columns of the state do not depend on each other. So a block of columns, which fits
// the first-level cache, takes many positions before the next block does.
#include "operators.h"
#include "recurrence.h"
#include "simd.h"

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
        : query(s.key_dim), key(s.key_dim), value(s.value_dim) {}

    std::vector<A> query, key, value;
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

  /// As Recurrence::run, by blocks of columns.
  void run(const RecurrentRequest& request, int64_t head, T* out) const {
    const int64_t blocks = (s_.value_dim + kColumns - 1) / kColumns;
    const int64_t size = s_.key_dim * kRegisters, replayed = request.committed - request.stood;
    const int64_t positions = replayed + request.count;
    std::vector<Row> rows(std::min(positions, kPositions), Row(s_));
    const Buffer<Vec<A>> buffer(blocks * size);
    Vec<A>* state = buffer.get();
    A* kept = this->kept_state(request, head);
    if (request.stood > 0) {
      for (int64_t b = 0; b < blocks; ++b) copy(kept, b, state, size);
    } else {
      std::fill(state, state + blocks * size, Vec<A>{});  // A fresh request: its slot is not read.
    }
    for (int64_t first = 0; first < positions; first += kPositions) {
      const int64_t last = std::min(first + kPositions, positions);
      for (int64_t i = first; i < last; ++i) {
        prepare(request, request.stood + i, head, rows[i - first]);
      }
      for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t i = first; i < last; ++i) {
          if (i == replayed + request.certain) keep(state, b, size, kept);
          T* row = out + ((request.first + i - replayed) * s_.heads + head) * s_.value_dim;
          step(rows[i - first], b, state + b * size, i < replayed ? nullptr : row);
        }
      }
    }
    for (int64_t b = 0; b < blocks && request.certain >= request.count; ++b) {
      keep(state, b, size, kept);
    }
  }

 private:
  /// Columns of a block, and positions that a block takes before the next block does.
  static constexpr int64_t kRegisters = 4, kColumns = kRegisters * kLanes<A>, kPositions = 64;

  int64_t columns(int64_t block) const {
    return std::min(s_.value_dim - block * kColumns, kColumns);
  }

  /// Copies one line of a block. With a constant size the compiler inlines the copy.
  static void move(void* to, const void* from, int64_t columns) {
    if (columns == kColumns) {
      std::memcpy(to, from, kColumns * sizeof(A));
    } else {
      std::memcpy(to, from, columns * sizeof(A));
    }
  }

  /// A block of a state [Dk, Dv] into registers, with zeros behind its last column.
  void copy(const A* from, int64_t block, Vec<A>* state, int64_t size) const {
    const bool is_part = columns(block) < kColumns;
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      Vec<A>* line = state + block * size + k * kRegisters;
      const A* source = from + k * s_.value_dim + block * kColumns;
      if (is_part) std::fill(line, line + kRegisters, Vec<A>{});
      move(line, source, columns(block));
    }
  }

  /// A block from registers into a state [Dk, Dv].
  void keep(const Vec<A>* state, int64_t block, int64_t size, A* to) const {
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      A* line = to + k * s_.value_dim + block * kColumns;
      const Vec<A>* source = state + block * size + k * kRegisters;
      move(line, source, columns(block));
    }
  }

  /// state <- decay state; state <- state + key (beta (value - key state))^T; out <- query state.
  void step(const Row& row, int64_t block, Vec<A>* state, T* out) const {
    Vec<A> sums[kRegisters] = {}, value[kRegisters] = {}, answer[kRegisters] = {};
    std::memcpy(value, row.value.data() + block * kColumns, columns(block) * sizeof(A));
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      for (int64_t r = 0; r < kRegisters; ++r) {
        sums[r] += state[k * kRegisters + r] * row.decay * row.key[k];
      }
    }
    for (int64_t r = 0; r < kRegisters; ++r) sums[r] = (value[r] - sums[r]) * row.beta;
    for (int64_t k = 0; k < s_.key_dim; ++k) {
      for (int64_t r = 0; r < kRegisters; ++r) {
        const Vec<A> decayed = state[k * kRegisters + r] * row.decay;
        const Vec<A> x = decayed + sums[r] * row.key[k];
        state[k * kRegisters + r] = x;
        answer[r] += x * row.query[k];
      }
    }
    if (out == nullptr) return;
    A found[kColumns];
    std::memcpy(found, answer, sizeof(found));
    for (int64_t v = 0; v < columns(block); ++v) {
      out[block * kColumns + v] = static_cast<T>(found[v]);
    }
  }

  static void normalise(std::vector<A>& x, A scale) {
    // As many sums as the widest registers have lanes, so that narrower ones give the same bits.
    constexpr int kSums = 16;
    A sums[kSums] = {};
    for (size_t i = 0; i < x.size(); i += kSums) {
      const size_t lanes = std::min<size_t>(x.size() - i, kSums);
      for (size_t lane = 0; lane < lanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
    }
    for (int width = kSums / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    }
    const A factor = 1 / std::sqrt(sums[0] + static_cast<A>(1e-6));
    each_register(x, [&](Vec<A> value, auto) { return value * factor * scale; });
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
