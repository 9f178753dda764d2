// Choosing tokens. A row costs what its request asked for: a greedy row takes one pass over the
// logits, filters take a few, and noise is made only for tokens that can still win.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "operators.h"
#include "philox.h"
#include "tensors.h"

namespace mtpc {
namespace {

constexpr double kOff = -std::numeric_limits<double>::infinity();

// Columns, as mtpc/sampling_params.py names them.
enum Float { kTemperature, kTopP, kMinP, kRepetition, kPresence, kFrequency, kFloats };
enum Int { kSeed, kTopK, kFirstStop, kMasked, kPenalised, kLogprobs, kInts };

/// The argmax, the first of equals; -1 where it is not finite or anything is NaN.
template <class T>
int64_t finite_argmax(const T* x, int64_t count) {
  using A = Accumulator<T>;
  constexpr int64_t kBlock = 4096;
  A best = -kInfinity<A>;
  int64_t at = -1;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Vec<A> tops = Vec<A>{} - kInfinity<A>;
    Mask<A> disordered{};
    int64_t v = begin;
    for (; v + kLanes<A> <= end; v += kLanes<A>) {
      const Vec<A> values = load<A>(x + v);
      tops = values > tops ? values : tops;
      disordered |= values != values;
    }
    A top = max_lanes<A>(tops);
    bool ordered = true;
    for (int lane = 0; lane < kLanes<A>; ++lane) ordered &= disordered[lane] == 0;
    for (; v < end; ++v) {
      const A value = static_cast<A>(x[v]);
      top = std::max(top, value);
      ordered &= value == value;
    }
    if (!ordered) return -1;
    if (top > best) {
      best = top;
      at = std::find_if(x + begin, x + end, [&](T value) {
             return static_cast<A>(value) == top;
           }) - x;
    }
  }
  return std::isfinite(best) ? at : -1;
}

/// A dense row of a tensor whose last dimension is adjacent.
template <class T>
const T* row_of(const Tensor& t, int64_t row) {
  return static_cast<const T*>(t.const_data_ptr()) + row * t.stride(0);
}

bool bit(const int32_t* words, int64_t token) {
  return static_cast<uint32_t>(words[token / 32]) >> (token % 32) & 1;
}

/// One request's parameters.
struct Params {
  const double* floats;
  const int64_t* ints;
  const int64_t* bias_ids;
  const double* bias_values;
  int64_t num_bias;
  const int32_t* allowed;
  const int32_t* prompt;
  const int32_t* counts;
  const int64_t* stops;
  int64_t num_stops;

  bool greedy() const { return floats[kTemperature] == 0; }
  bool penalised() const { return ints[kPenalised] != 0; }
  bool masked() const { return ints[kMasked] != 0; }
  bool biased() const { return num_bias > 0 && bias_ids[0] >= 0; }
};

/// One row to choose a token for.
struct Row {
  Params params;
  int64_t position;
  const int64_t* drafts;  // fed to the request's rows up to this one
  int64_t num_drafts;
  const int32_t* mask;  // may be null

  bool stops_early() const { return position < params.ints[kFirstStop]; }

  /// Whether the greatest logit is the choice.
  bool is_plain() const {
    return params.greedy() && !params.penalised() && !params.masked() && !params.biased() &&
        mask == nullptr && !stops_early();
  }
};

class Chooser {
 public:
  Chooser(const Row& row, int64_t vocabulary)
      : row_(row), p_(row.params), size_(vocabulary), x_(vocabulary) {}

  template <class T>
  int64_t choose(const T* logits) {
    if (finite_argmax(logits, size_) < 0) return -1;
    for (int64_t v = 0; v < size_; ++v) x_.get()[v] = static_cast<double>(logits[v]);
    if (p_.biased()) add_bias();
    if (p_.penalised()) penalise();
    if (p_.masked()) forbid_unset(p_.allowed);
    if (row_.mask != nullptr) forbid_unset(row_.mask);
    if (row_.stops_early()) forbid_stops();
    // Where all logits are -inf, no token is allowed.
    const int64_t top = finite_argmax(x_.get(), size_);
    if (top < 0) return -1;
    if (p_.greedy()) return top;
    const double temperature = p_.floats[kTemperature];
    for (int64_t v = 0; v < size_; ++v) x_.get()[v] /= temperature;
    return race(top, cut(x_.get()[top]));
  }

 private:
  void add_bias() {
    for (int64_t i = 0; i < p_.num_bias && p_.bias_ids[i] >= 0; ++i) {
      x_.get()[p_.bias_ids[i]] += p_.bias_values[i];
    }
  }

  /// The logit of a token that was seen, `count` times in the output.
  double penalised(double x, int64_t count) const {
    const double repetition = p_.floats[kRepetition];
    x = x > 0 ? x / repetition : x * repetition;
    x -= p_.floats[kFrequency] * static_cast<double>(count);
    return x - p_.floats[kPresence] * (count > 0);
  }

  void penalise() {
    double* x = x_.get();
    std::vector<int64_t> drafts(row_.drafts, row_.drafts + row_.num_drafts);
    std::sort(drafts.begin(), drafts.end());
    std::vector<double> before;
    for (const int64_t token : drafts) before.push_back(x[token]);
    for (int64_t begin = 0; begin < size_; begin += 32) {  // Most words hold no seen token.
      const int64_t end = std::min(begin + 32, size_);
      int32_t any = p_.prompt[begin / 32];
      for (int64_t v = begin; v < end; ++v) any |= p_.counts[v];
      for (int64_t v = begin; any != 0 && v < end; ++v) {
        const int32_t count = p_.counts[v];
        if (count > 0 || bit(p_.prompt, v)) x[v] = penalised(x[v], count);
      }
    }
    for (size_t i = 0; i < drafts.size(); ++i) {
      const int64_t token = drafts[i];
      const int64_t more = std::upper_bound(drafts.begin(), drafts.end(), token) -
          std::lower_bound(drafts.begin(), drafts.end(), token);
      x[token] = penalised(before[i], p_.counts[token] + more);
    }
  }

  void forbid_unset(const int32_t* words) {
    double* x = x_.get();
    for (int64_t begin = 0; begin < size_; begin += 32) {
      if (words[begin / 32] == -1) continue;
      const int64_t end = std::min(begin + 32, size_);
      for (int64_t v = begin; v < end; ++v) x[v] = bit(words, v) ? x[v] : kOff;
    }
  }

  void forbid_stops() {
    for (int64_t i = 0; i < p_.num_stops; ++i) {
      if (p_.stops[i] >= 0 && p_.stops[i] < size_) x_.get()[p_.stops[i]] = kOff;
    }
  }

  /// The least logit that min-p, top-k and top-p all keep.
  double cut(double top) const {
    double least = std::max(top + std::log(p_.floats[kMinP]), kOff);
    const int64_t k = p_.ints[kTopK];
    if (k > 0 && k < size_) least = kth_greatest(k, least);
    return p_.floats[kTopP] < 1 ? nucleus(top, least) : least;
  }

  /// The k-th greatest of logits of at least `least`, or that where there are fewer.
  double kth_greatest(int64_t k, double least) const {
    const size_t room = 2 * k + 1024;
    std::vector<double> held;
    const auto keep_k = [&] {
      if (static_cast<int64_t>(held.size()) < k) return;
      std::nth_element(held.begin(), held.begin() + (k - 1), held.end(), std::greater<>());
      held.resize(k);
      least = std::max(least, held[k - 1]);
    };
    for (int64_t v = 0; v < size_; ++v) {
      if (!(x_.get()[v] >= least)) continue;
      held.push_back(x_.get()[v]);
      if (held.size() >= room) keep_k();  // From here on, few are above the k-th so far.
    }
    keep_k();
    return least;
  }

  struct Weighed {
    double x, weight;
  };

  /// The least logit of the smallest set of most probable tokens that has the mass asked for:
  /// quickselect by mass, because the set may be most of the vocabulary.
  double nucleus(double top, double least) const {
    std::vector<Weighed> all;
    double total = 0;
    for (int64_t v = 0; v < size_; ++v) {
      const double x = x_.get()[v];
      if (!(x >= least) || x == kOff) continue;
      all.push_back({x, std::exp(x - top)});
      total += all.back().weight;
    }
    double wanted = p_.floats[kTopP] * total, edge = top;
    auto begin = all.begin(), end = all.end();
    while (begin != end) {
      const double pivot = middle(begin->x, begin[(end - begin) / 2].x, end[-1].x);
      const auto equal = std::partition(begin, end, [&](const Weighed& w) { return w.x > pivot; });
      const auto below = std::partition(equal, end, [&](const Weighed& w) { return w.x == pivot; });
      const auto mass = [](auto from, auto to) {
        double sum = 0;
        for (; from != to; ++from) sum += from->weight;
        return sum;
      };
      const double above = mass(begin, equal), here = mass(equal, below);
      if (equal != begin && above >= wanted) {
        end = equal;
        continue;
      }
      edge = pivot;  // All above it are in, and so are those that equal it.
      if (above + here >= wanted) return edge;
      wanted -= above + here;
      begin = below;
    }
    return edge;
  }

  static double middle(double a, double b, double c) {
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
  }

  /// The argmax of logits + Gumbel noise, over tokens of at least `least`.
  int64_t race(int64_t top, double least) const {
    const PairedNoise noise(p_.ints[kSeed], row_.position);
    constexpr int kTokens = 2 * PairedNoise::kPairs;
    uint64_t steps[kTokens];
    double best = kOff;
    int64_t winner = -1;
    const auto run = [&](int64_t v, uint64_t step) {
      const double x = x_.get()[v];
      if (!(x >= least) || x == kOff || !may_beat(step, x - best)) return;
      const double u = (static_cast<double>(step) + 0.5) * 0x1p-52;
      const double score = x - std::log(-std::log(u));
      if (score > best || (score == best && v < winner)) best = score, winner = v;
    };
    noise.fill(top / 2, steps);  // The likely winner runs first, so that most others need not run.
    run(top, steps[top % 2]);
    for (int64_t begin = 0; begin < size_; begin += kTokens) {
      const int64_t count = std::min<int64_t>(kTokens, size_ - begin);
      const double* x = x_.get() + begin;
      bool any = false;  // may still win
      const double hopeless = std::max(least, best - kMostNoise);
      for (int64_t i = 0; i < count; ++i) any |= x[i] >= hopeless;
      if (!any) continue;
      noise.fill(begin / 2, steps);
      for (int64_t i = 0; i < count; ++i) run(begin + i, steps[i]);
    }
    return winner;
  }

  /// Above the Gumbel noise of the greatest u, -log(-log(1 - 2^-53)).
  static constexpr double kMostNoise = 36.8;

  /// Whether noise can lift a token over `-margin` more than its logit: -log(u) >= 1 - u, whose
  /// logarithm is at least log(2) times its exponent. No logarithm is taken for the others.
  static bool may_beat(uint64_t step, double margin) {
    const uint64_t rest = (uint64_t{1} << 52) - step;  // 1 - u, in steps, rounded up by a half
    const int exponent = std::bit_width(rest) - 2 - 52;
    return exponent * 0.6931471805599453 <= margin;
  }

  const Row& row_;
  const Params& p_;
  const int64_t size_;
  Buffer<double> x_;
};

void check_dtype(const Tensor& t, ScalarType dtype, int64_t dim, const char* name) {
  STD_TORCH_CHECK(
      t.scalar_type() == dtype && t.dim() == dim && (dim < 2 || t.stride(dim - 1) == 1 ||
                                                     t.size(dim - 1) <= 1),
      "mtpc_cpu::sample: ", name, " must be ", torch::headeronly::toString(dtype), " of ", dim,
      " dimensions, the last adjacent in memory");
}

/// The row of the logits that each of N rows reads.
class LogitsRows {
 public:
  LogitsRows(
      const Tensor& logits, int64_t rows, const std::optional<Tensor>& places, const char* name)
      : count_(logits.size(0)), name_(name) {
    if (places) places_.emplace(*places, "places", 1);
    const int64_t given = places ? places->size(0) : count_;
    STD_TORCH_CHECK(
        given == rows, name, ": ", given, places ? " places" : " rows of logits",
        "; expected one for each of ", rows, " rows");
  }

  int64_t operator()(int64_t row) const {
    if (!places_) return row;
    const int64_t place = (*places_)(row);
    STD_TORCH_CHECK(
        place >= 0 && place < count_, name_, ": place ", place, " of ", count_, " rows of logits");
    return place;
  }

 private:
  int64_t count_;
  const char* name_;
  std::optional<Indices> places_;
};

/// A row's mask, or null where it forbids nothing: the row of a request without a grammar is plain.
const int32_t* narrowing(const int32_t* mask, int64_t words) {
  const bool forbids = std::any_of(mask, mask + words, [](int32_t word) { return word != -1; });
  return forbids ? mask : nullptr;
}

}  // namespace

MTPC_OPERATOR Tensor sample(
    const Tensor& logits, const Tensor& ids, const Tensor& positions, const Tensor& state_slots,
    const Tensor& floats, const Tensor& ints, const Tensor& bias_ids, const Tensor& bias_values,
    const Tensor& allowed_tokens, const Tensor& prompt_tokens, const Tensor& output_counts,
    const Tensor& stop_ids, const std::optional<Tensor>& token_mask,
    const std::optional<Tensor>& places) {
  const Tensor values = adjacent_last(logits);
  const Tensor fed = torch::stable::contiguous(ids);
  const Indices at(positions, "positions", 1), slots(state_slots, "state_slots", 1);
  const int64_t rows = ids.size(0), vocabulary = values.size(1);
  const LogitsRows row_at(values, rows, places, "mtpc_cpu::sample");
  const int64_t requests = state_slots.size(0);
  STD_TORCH_CHECK(
      requests > 0 && rows % requests == 0 && positions.size(0) == rows,
      "mtpc_cpu::sample: expected ids [N] and positions [N], N a multiple of the ",
      requests, " state_slots");
  check_dtype(fed, ScalarType::Long, 1, "ids");
  check_dtype(floats, ScalarType::Double, 2, "floats");
  check_dtype(ints, ScalarType::Long, 2, "ints");
  check_dtype(bias_ids, ScalarType::Long, 2, "bias_ids");
  check_dtype(bias_values, ScalarType::Double, 2, "bias_values");
  check_dtype(allowed_tokens, ScalarType::Int, 2, "allowed_tokens");
  check_dtype(prompt_tokens, ScalarType::Int, 2, "prompt_tokens");
  check_dtype(output_counts, ScalarType::Int, 2, "output_counts");
  check_dtype(stop_ids, ScalarType::Long, 2, "stop_ids");
  if (token_mask) check_dtype(*token_mask, ScalarType::Int, 2, "token_mask");
  STD_TORCH_CHECK(
      floats.size(1) == kFloats && ints.size(1) == kInts && output_counts.size(1) == vocabulary,
      "mtpc_cpu::sample: expected floats [S, ", int(kFloats), "], ints [S, ", int(kInts),
      "] and output_counts [S, ", vocabulary, "]");

  const Tensor out = torch::stable::new_empty(fed, {rows});
  int64_t* chosen = static_cast<int64_t*>(out.mutable_data_ptr());
  const int64_t each = rows / requests;
  with_type(values.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    run_tasks(rows, worker_count(rows * vocabulary * 4), [&](int64_t i) {
      const int64_t slot = slots(i / each);
      // SCRATCH_SLOT: its content belongs to no request.
      if (slot == 0 || at(i) < 0) {
        chosen[i] = -1;
        return;
      }
      const Params params{
          row_of<double>(floats, slot), row_of<int64_t>(ints, slot),
          row_of<int64_t>(bias_ids, slot), row_of<double>(bias_values, slot),
          bias_ids.size(1), row_of<int32_t>(allowed_tokens, slot),
          row_of<int32_t>(prompt_tokens, slot), row_of<int32_t>(output_counts, slot),
          row_of<int64_t>(stop_ids, slot), stop_ids.size(1)};
      const int64_t first = i / each * each;
      const Row row{
          params, at(i), row_of<int64_t>(fed, 0) + first + 1, i - first,
          token_mask ? narrowing(row_of<int32_t>(*token_mask, i), token_mask->size(1)) : nullptr};
      const T* x = row_of<T>(values, row_at(i));
      chosen[i] = row.is_plain() ? finite_argmax(x, vocabulary)
                                 : Chooser(row, vocabulary).choose(x);
    });
  });
  return out;
}

MTPC_OPERATOR void count_tokens(
    const Tensor& output_counts, const Tensor& ids, const Tensor& num_emitted,
    const Tensor& state_slots) {
  check_dtype(output_counts, ScalarType::Int, 2, "output_counts");
  const Indices tokens(ids, "ids", 2), emitted(num_emitted, "num_emitted", 1);
  const Indices slots(state_slots, "state_slots", 1);
  int32_t* counts = static_cast<int32_t*>(output_counts.mutable_data_ptr());
  for (int64_t r = 0; r < state_slots.size(0); ++r) {
    for (int64_t j = 0; slots(r) != 0 && j < emitted(r); ++j) {
      // Unsigned: the counts of a request without penalties are garbage, and may wrap around.
      int32_t& count = counts[slots(r) * output_counts.stride(0) + tokens(r, j)];
      count = static_cast<int32_t>(static_cast<uint32_t>(count) + 1);
    }
  }
}

namespace {

/// The memory that takes one token's log-probabilities.
struct Report {
  double* logprob;
  int64_t* ids;
  double* logprobs;
  int64_t count;
};

/// The largest of some values; NaN is not.
template <class T>
double largest(const T* x, int64_t count) {
  using A = Accumulator<T>;
  Vec<A> tops = Vec<A>{} - kInfinity<A>;
  int64_t v = 0;
  for (; v + kLanes<A> <= count; v += kLanes<A>) {
    const Vec<A> values = load<A>(x + v);
    tops = values > tops ? values : tops;
  }
  A top = max_lanes<A>(tops);
  for (; v < count; ++v) top = std::max(top, static_cast<A>(x[v]));
  return static_cast<double>(top);
}

/// The sum of e^(x - top).
template <class T>
double sum_of_powers(const T* x, int64_t count, double top) {
  constexpr int64_t kN = kLanes<double>;
  Vec<double> total{};
  const auto add = [&](int64_t begin, int64_t lanes) {
    Vec<double> values = Vec<double>{} + kOff;
    for (int64_t i = 0; i < lanes; ++i) values[i] = static_cast<double>(x[begin + i]) - top;
    total += exp(values);
  };
  int64_t begin = 0;
  for (; begin + kN <= count; begin += kN) add(begin, kN);
  add(begin, count - begin);
  return sum_lanes<double>(total);
}

template <class T>
void report_token(const T* x, int64_t vocabulary, int64_t chosen, const Report& to) {
  constexpr int64_t kBlock = 64;
  const double top = largest(x, vocabulary);
  const double log_total = top + std::log(sum_of_powers(x, vocabulary, top));
  *to.logprob = static_cast<double>(x[chosen]) - log_total;
  const int64_t count = std::min(to.count, vocabulary);
  if (count == 0) return;
  int64_t held = 0;  // The most probable so far, falling; the first of equals stands first.
  const auto is_in = [&](double value) { return held < count || value > to.logprobs[held - 1]; };
  for (int64_t begin = 0; begin < vocabulary; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, vocabulary);
    if (!is_in(largest(x + begin, end - begin) - log_total)) continue;
    for (int64_t v = begin; v < end; ++v) {
      const double value = static_cast<double>(x[v]) - log_total;
      if (!is_in(value)) continue;
      int64_t place = held < count ? held++ : held - 1;
      for (; place > 0 && value > to.logprobs[place - 1]; --place) {
        to.logprobs[place] = to.logprobs[place - 1];
        to.ids[place] = to.ids[place - 1];
      }
      to.logprobs[place] = value;
      to.ids[place] = v;
    }
  }
}

}  // namespace

MTPC_OPERATOR void write_logprobs(
    const Tensor& logprobs, const Tensor& top_ids, const Tensor& top_logprobs,
    const Tensor& logits, const Tensor& ids, const Tensor& num_emitted,
    const Tensor& state_slots, const Tensor& ints, const std::optional<Tensor>& places) {
  check_dtype(logprobs, ScalarType::Double, 2, "logprobs");
  check_dtype(top_ids, ScalarType::Long, 3, "top_ids");
  check_dtype(top_logprobs, ScalarType::Double, 3, "top_logprobs");
  check_dtype(ints, ScalarType::Long, 2, "ints");
  STD_TORCH_CHECK(
      logprobs.is_contiguous() && top_ids.is_contiguous() && top_logprobs.is_contiguous(),
      "mtpc_cpu::write_logprobs: the reports must be contiguous");
  const Tensor values = adjacent_last(logits);
  const Indices tokens(ids, "ids", 2), emitted(num_emitted, "num_emitted", 1);
  const Indices slots(state_slots, "state_slots", 1);
  const int64_t width = ids.size(1), held = logprobs.size(1), count = top_ids.size(2);
  const int64_t rows = ids.size(0) * width;
  const LogitsRows row_at(values, rows, places, "mtpc_cpu::write_logprobs");
  with_type(values.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    run_tasks(rows, worker_count(rows * values.size(1)), [&](int64_t i) {
      const int64_t r = i / width, j = i % width, slot = slots(r);
      if (slot == 0 || j >= emitted(r) || row_of<int64_t>(ints, slot)[kLogprobs] < 0) return;
      const int64_t at = r * held + j;
      report_token(
          row_of<T>(values, row_at(i)), values.size(1), tokens(r, j),
          {static_cast<double*>(logprobs.mutable_data_ptr()) + at,
           static_cast<int64_t*>(top_ids.mutable_data_ptr()) + at * count,
           static_cast<double*>(top_logprobs.mutable_data_ptr()) + at * count, count});
    });
  });
}

}  // namespace mtpc
