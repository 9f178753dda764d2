// What stands between linears: norms, activations, rotary angles. See mtpc/ops/fused.py.
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace mtpc {
namespace {

constexpr int kStep = kLanes<float>;

/// Calls body(i, count) for every register's worth of `width` elements, the last may be less.
template <class Body>
void for_steps(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) body(i, std::integral_constant<int, kStep>{});
  if (i < width) body(i, static_cast<int>(width - i));
}

/// Elements from p on: a register full of them where `count` is a constant.
inline Vec<float> take(const BFloat16* p, std::integral_constant<int, kStep>) {
  return load<float>(p);
}
inline Vec<float> take(const BFloat16* p, int count) { return load_first<float>(p, count); }

inline void put(BFloat16* p, Vec<float> v, std::integral_constant<int, kStep>) { narrow(p, v); }
inline void put(BFloat16* p, Vec<float> v, int count) {
  BFloat16 all[kStep];
  narrow(all, v);
  std::memcpy(p, all, count * sizeof(BFloat16));
}

/// Where a tensor's rows begin, whatever the strides of its dimensions but the last.
class RowStarts {
 public:
  explicit RowStarts(const Tensor& t) : data_(static_cast<const BFloat16*>(t.const_data_ptr())) {
    for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
      sizes_.push_back(t.size(dim));
      strides_.push_back(t.stride(dim));
    }
  }

  const BFloat16* operator()(int64_t row) const {
    int64_t offset = 0;
    for (size_t dim = sizes_.size(); dim-- > 0; row /= sizes_[dim]) {
      offset += row % sizes_[dim] * strides_[dim];
    }
    return data_ + offset;
  }

 private:
  const BFloat16* data_;
  std::vector<int64_t> sizes_, strides_;
};

struct Norm {
  const BFloat16* weight;
  int64_t width;
  float epsilon;
  bool plus_one;

  /// out = the norm of `row`. Adds up lane by lane, then across lanes, for each row alike.
  void operator()(const BFloat16* row, BFloat16* out) const {
    Vec<float> squares{};
    for_steps(width, [&](int64_t i, auto count) {
      const Vec<float> x = take(row + i, count);
      squares += x * x;
    });
    const float mean = sum_lanes<float>(squares) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + epsilon);
    for_steps(width, [&](int64_t i, auto count) {
      const Vec<float> x = take(row + i, count) * scale, w = take(weight + i, count);
      put(out + i, plus_one ? x * (w + 1.0f) : round_bf16(x) * w, count);
    });
  }
};

Norm check_norm(const Tensor& x, const Tensor& weight, double epsilon, bool plus_one) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1) &&
          weight.is_contiguous() && x.scalar_type() == ScalarType::BFloat16 &&
          weight.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::rms_norm: expected bfloat16 x [..., N] and weight [N]");
  return {static_cast<const BFloat16*>(weight.const_data_ptr()), weight.size(0),
          static_cast<float>(epsilon), plus_one};
}

BFloat16* data(const Tensor& t) { return static_cast<BFloat16*>(t.mutable_data_ptr()); }

/// Elements of a pass are worth so many multiply-adds of a product.
constexpr int64_t kWork = 8;

}  // namespace

Tensor rms_norm(
    const Tensor& x, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows) {
  const Norm norm = check_norm(x, weight, epsilon, plus_one);
  const Tensor from = adjacent_last(x);
  const Tensor out = empty_rows(x, norm.width);
  const int64_t used = used_rows(rows, count_rows(x, norm.width));
  zero_from(out, used, norm.width);
  const RowStarts starts(from);
  run_tasks(used, worker_count(used * norm.width * kWork), [&](int64_t r) {
    norm(starts(r), data(out) + r * norm.width);
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(
    const Tensor& x, const Tensor& added, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows) {
  const Norm norm = check_norm(x, weight, epsilon, plus_one);
  STD_TORCH_CHECK(
      added.scalar_type() == ScalarType::BFloat16 && added.dim() == x.dim() &&
          added.numel() == x.numel() && added.size(x.dim() - 1) == norm.width,
      "mtpc_cpu::add_rms_norm: both summands must have one shape");
  const Tensor left = adjacent_last(x), right = adjacent_last(added);
  const Tensor total = empty_rows(x, norm.width), out = empty_rows(x, norm.width);
  const int64_t used = used_rows(rows, count_rows(x, norm.width));
  zero_from(total, used, norm.width);
  zero_from(out, used, norm.width);
  const RowStarts lefts(left), rights(right);
  run_tasks(used, worker_count(used * norm.width * kWork), [&](int64_t r) {
    const BFloat16 *a = lefts(r), *b = rights(r);
    BFloat16* sums = data(total) + r * norm.width;
    for_steps(norm.width, [&](int64_t i, auto count) {
      put(sums + i, take(a + i, count) + take(b + i, count), count);
    });
    norm(sums, data(out) + r * norm.width);
  });
  return {total, out};
}

Tensor silu_and_mul(const Tensor& gate_up, const std::optional<Tensor>& rows) {
  const int64_t both = gate_up.dim() == 0 ? 1 : gate_up.size(gate_up.dim() - 1), width = both / 2;
  STD_TORCH_CHECK(
      both % 2 == 0 && gate_up.scalar_type() == ScalarType::BFloat16,
      "mtpc_cpu::silu_and_mul: expected bfloat16 gate_up [..., 2 I]");
  const Tensor from = adjacent_last(gate_up);
  const Tensor out = empty_rows(gate_up, width);
  const int64_t used = used_rows(rows, count_rows(gate_up, both));
  zero_from(out, used, width);
  const RowStarts starts(from);
  // An exponential and a division are worth as much as all else.
  run_tasks(used, worker_count(used * width * 2 * kWork), [&](int64_t r) {
    const BFloat16* gate = starts(r);
    BFloat16* to = data(out) + r * width;
    for_steps(width, [&](int64_t i, auto count) {
      const Vec<float> x = take(gate + i, count);
      put(to + i, round_bf16(x / (exp(-x) + 1.0f)) * take(gate + width + i, count), count);
    });
  });
  return out;
}

Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& rows) {
  const auto is_angles = [&](const Tensor& t) {
    return t.dim() == 2 && t.size(0) == x.size(0) && t.scalar_type() == ScalarType::BFloat16 &&
        t.size(1) % 2 == 0 && t.size(1) <= x.size(2) && t.size(1) == cos.size(1);
  };
  STD_TORCH_CHECK(
      x.dim() == 3 && x.scalar_type() == ScalarType::BFloat16 && is_angles(cos) && is_angles(sin),
      "mtpc_cpu::rotate: expected bfloat16 x [T, heads, D], cos and sin [T, C], C even and <= D");
  const int64_t heads = x.size(1), width = x.size(2), half = cos.size(1) / 2;
  const Tensor from = adjacent_last(x), cosines = adjacent_last(cos), sines = adjacent_last(sin);
  const Tensor out = empty_rows(x, width);
  const int64_t used = used_rows(rows, x.size(0));
  zero_from(out, used, heads * width);
  const RowStarts starts(from), c_starts(cosines), s_starts(sines);
  run_tasks(used, worker_count(used * heads * width * kWork), [&](int64_t t) {
    const BFloat16 *c = c_starts(t), *s = s_starts(t);
    for (int64_t h = 0; h < heads; ++h) {
      const BFloat16* head = starts(t * heads + h);
      BFloat16* to = data(out) + (t * heads + h) * width;
      for_steps(half, [&](int64_t i, auto count) {
        const Vec<float> a = take(head + i, count), b = take(head + half + i, count);
        const auto turned = [&](Vec<float> own, Vec<float> other, int64_t at) {
          put(to + at, round_bf16(own * take(c + at, count)) +
                  round_bf16(other * take(s + at, count)), count);
        };
        turned(a, -b, i);
        turned(b, a, half + i);
      });
      std::copy(head + 2 * half, head + width, to + 2 * half);
    }
  });
  return out;
}

}  // namespace mtpc
