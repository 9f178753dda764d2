// Rotary position embedding, alone and with the writes to the caches. See mtpc/ops/fused.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "cache_codes.h"
#include "operators.h"

namespace mtpc {
namespace {

/// The heads of tokens, [T, heads, D]: where each begins.
class Heads {
 public:
  explicit Heads(const Tensor& t)
      : count(t.size(1)),
        width(t.size(2)),
        data_(static_cast<const BFloat16*>(t.const_data_ptr())),
        token_(t.stride(0)),
        head_(t.stride(1)) {}

  const BFloat16* operator()(int64_t token, int64_t head) const {
    return data_ + token * token_ + head * head_;
  }

  const int64_t count, width;

 private:
  const BFloat16* data_;
  int64_t token_, head_;
};

/// A cache of heads, [N, P, heads, D], of bfloat16 or of codes with scales.
class Slots {
 public:
  Slots(const Tensor& t, const std::optional<Tensor>& scales) : capacity(t.size(0) * t.size(1)) {
    if (scales) {
      codes_.emplace(t, *scales);
    } else {
      numbers_ = {data(t), t};
    }
  }

  /// Writes a head: fill(to) writes its features, which get codes when all are there.
  template <class Fill>
  void write(int64_t slot, int64_t head, int64_t width, Buffer<BFloat16>& memory,
             const Fill& fill) const {
    if (!codes_) return fill(numbers_.at(slot, head));
    BFloat16* row = memory.reserve(width);
    fill(row);
    codes_->write(slot, head, row, width);
  }

  const int64_t capacity;

 private:
  Places<BFloat16> numbers_;
  std::optional<CodedSlots> codes_;
};

/// Cosines and sines of tokens, [T, C].
struct Angles {
  RowStarts cosines, sines;
  int64_t half;

  /// Turns a token's head of `width` features; those from C on stay.
  void turn(int64_t token, const BFloat16* head, BFloat16* to, int64_t width) const {
    const BFloat16 *c = cosines(token), *s = sines(token);
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
};

bool is_heads(const Tensor& t, int64_t tokens) {
  return t.dim() == 3 && t.size(0) == tokens && t.scalar_type() == ScalarType::BFloat16;
}

bool is_angles(const Tensor& t, const Tensor& x) {
  return t.dim() == 2 && t.size(0) == x.size(0) && t.scalar_type() == ScalarType::BFloat16 &&
      t.size(1) % 2 == 0 && t.size(1) <= x.size(2);
}

bool is_cache_of(
    const Tensor& cache, const Tensor& rows, const std::optional<Tensor>& scales) {
  return cache.dim() == 4 && cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2) &&
      cache.stride(3) == 1 &&
      (scales ? holds_codes(cache) : cache.scalar_type() == ScalarType::BFloat16);
}

/// A slot beyond the cache would write into other memory.
void check_slots(const Indices& slots, int64_t count, int64_t capacity) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(
        slots(i) < capacity, "mtpc_cpu::rotate_and_write: slot ", slots(i), " of row ", i,
        " is beyond the ", capacity, " slots of the cache");
  }
}

}  // namespace

MTPC_OPERATOR Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& rows) {
  STD_TORCH_CHECK(
      x.dim() == 3 && is_heads(x, x.size(0)) && is_angles(cos, x) && is_angles(sin, x) &&
          cos.size(1) == sin.size(1),
      "mtpc_cpu::rotate: expected bfloat16 x [T, heads, D], cos and sin [T, C], C even and <= D");
  const Tensor from = adjacent_last(x), cosines = adjacent_last(cos), sines = adjacent_last(sin);
  const Angles angles{RowStarts(cosines), RowStarts(sines), cos.size(1) / 2};
  const Heads heads(from);
  const int64_t width = heads.count * heads.width;
  const Tensor out = empty_rows(x, heads.width);
  const int64_t used = used_rows(rows, x.size(0));
  run_tasks(used, worker_count(used * width * kWork), [&](int64_t t) {
    for (int64_t h = 0; h < heads.count; ++h) {
      angles.turn(t, heads(t, h), data(out) + t * width + h * heads.width, heads.width);
    }
  });
  return out;
}

MTPC_OPERATOR Tensor rotate_and_write(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const std::optional<Tensor>& k_shift, const std::optional<Tensor>& rows) {
  STD_TORCH_CHECK(
      q.dim() == 3 && is_heads(q, q.size(0)) && is_heads(k, q.size(0)) &&
          is_heads(v, q.size(0)) && is_angles(cos, q) && is_angles(sin, q) && is_angles(cos, k) &&
          cos.size(1) == sin.size(1),
      "mtpc_cpu::rotate_and_write: expected bfloat16 q, k and v [T, heads, D], cos and sin [T, C], "
      "C even and <= D");
  STD_TORCH_CHECK(
      is_cache_of(k_cache, k, k_scale) && is_cache_of(v_cache, v, v_scale) &&
          k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1) &&
          slot_mapping.dim() == 1 && slot_mapping.size(0) == q.size(0),
      "mtpc_cpu::rotate_and_write: expected bfloat16 caches [N, P, heads, D] of k's and v's heads, "
      "or such of int8 or float8_e4m3fn with scales, slot_mapping [T]");
  STD_TORCH_CHECK(
      !k_shift || (k_shift->dim() == 2 && k_shift->scalar_type() == ScalarType::BFloat16 &&
                   k_shift->size(0) == k.size(1) && k_shift->size(1) == k.size(2) &&
                   k_shift->is_contiguous()),
      "mtpc_cpu::rotate_and_write: expected a contiguous bfloat16 k_shift [heads, D]");
  const BFloat16* shift =
      k_shift ? static_cast<const BFloat16*>(k_shift->const_data_ptr()) : nullptr;
  const Tensor q_rows = adjacent_last(q), k_rows = adjacent_last(k), v_rows = adjacent_last(v);
  const Tensor cosines = adjacent_last(cos), sines = adjacent_last(sin);
  const Angles angles{RowStarts(cosines), RowStarts(sines), cos.size(1) / 2};
  const Heads queries(q_rows), keys(k_rows), values(v_rows);
  const Slots k_slots(k_cache, k_scale), v_slots(v_cache, v_scale);
  const Indices slots(slot_mapping, "slot_mapping", 1);
  check_slots(slots, q.size(0), k_slots.capacity);
  const int64_t width = queries.count * queries.width;
  const Tensor out = empty_rows(q, queries.width);
  const int64_t used = used_rows(rows, q.size(0));
  using Memory = Buffer<BFloat16>;
  run_tasks<Memory>(q.size(0), worker_count(used * width * kWork), [&](int64_t t, Memory& memory) {
    for (int64_t h = 0; t < used && h < queries.count; ++h) {
      angles.turn(t, queries(t, h), data(out) + t * width + h * queries.width, queries.width);
    }
    const int64_t slot = slots(t);
    if (slot < 0) return;
    for (int64_t h = 0; h < keys.count; ++h) {
      k_slots.write(slot, h, keys.width, memory, [&](BFloat16* to) {
        angles.turn(t, keys(t, h), to, keys.width);
        if (shift == nullptr) return;
        for_steps(keys.width, [&](int64_t i, auto count) {
          put(to + i, take(to + i, count) - take(shift + h * keys.width + i, count), count);
        });
      });
    }
    for (int64_t h = 0; h < values.count; ++h) {
      v_slots.write(slot, h, values.width, memory, [&](BFloat16* to) {
        std::copy_n(values(t, h), values.width, to);
      });
    }
  });
  return out;
}

}  // namespace mtpc
