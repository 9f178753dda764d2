// Rows of K and V as codes of one byte with a scale each. See `quantise_rows` in
// mtpc/ops/attention.py.
//
// A code, int8 or float8_e4m3fn, is a number of bfloat16 exactly. So attention takes its products
// with codes as it takes those with a bfloat16 cache, and applies scales to scores and weights.
#pragma once

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "row_steps.h"

namespace mtpc {

/// An element of a cache of codes of either kind.
struct Code {
  uint8_t bits;
};

/// Whether a cache holds codes, and of float8.
inline bool holds_float8(const Tensor& cache) {
  return cache.scalar_type() == ScalarType::Float8_e4m3fn;
}
inline bool holds_codes(const Tensor& cache) {
  return cache.scalar_type() == ScalarType::Char || holds_float8(cache);
}

/// `spread` of the lanes of a register.
template <class A, int kApart = 1>
Vec<A> spread_lanes(Vec<A> x) {
  if constexpr (kApart == kLanes<A>) {
    return x;
  } else {
    const Vec<A> other =
        exchange_lanes<kApart>(x, std::make_integer_sequence<int, kLanes<A>>{});
    return spread_lanes<A, 2 * kApart>(other + ((lane_numbers<A>() & kApart) != 0 ? -x : x));
  }
}

/// `spread` of mtpc/ops/attention.py, in place; the same additions, in the same order.
template <class A>
void spread(A* x, int64_t width) {
  const int64_t block = width & -width;
  int64_t apart = 1;
  if (block >= kLanes<A>) {
    for (int64_t i = 0; i < width; i += kLanes<A>) store(x + i, spread_lanes<A>(load<A>(x + i)));
    apart = kLanes<A>;
  }
  for (; apart < block; apart *= 2) {
    for (int64_t first = 0; first < width; first += 2 * apart) {
      for (int64_t i = first; i < first + apart; ++i) {
        const A a = x[i], b = x[i + apart];
        x[i] = a + b;
        x[i + apart] = a - b;
      }
    }
  }
}

/// The reverse: a block's size is a power of two, so that dividing by it rounds nothing.
template <class A>
void unspread(A* x, int64_t width) {
  spread(x, width);
  const A share = A(1) / (width & -width);
  for (int64_t i = 0; i < width; ++i) x[i] *= share;
}

/// Writes a row's codes; returns its scale.
template <class T>
float write_codes(const T* from, int64_t width, bool is_float, Code* to) {
  const float most = is_float ? 448 : 127, scale = largest_magnitude(from, width) / most;
  if (!std::isfinite(scale)) {
    std::memset(to, 0, width);
    return scale;
  }
  const float divisor = scale > 0 ? scale : 1;
  for_steps(width, [&](int64_t i, auto count) {
    Vec<float> x = take(from + i, count) / divisor;
    x = x > most ? Vec<float>{} + most : x;
    x = x < -most ? Vec<float>{} - most : x;
    if (is_float) {
      for (int lane = 0; lane < count; ++lane) to[i + lane].bits = c10::Float8_e4m3fn(x[lane]).x;
    } else {
      const Mask<float> integers = round_to_integers(x);
      for (int lane = 0; lane < count; ++lane) to[i + lane].bits = integers[lane];
    }
  });
  return scale;
}

/// Where the heads of slots lie in a cache [N, P, heads, ...].
template <class E>
struct Places {
  Places() = default;
  Places(E* first, const Tensor& t)
      : first(first), size(t.size(1)), page(t.stride(0)), slot(t.stride(1)), head(t.stride(2)) {}

  E* at(int64_t s, int64_t h) const { return first + s / size * page + s % size * slot + h * head; }

  E* first = nullptr;
  int64_t size = 1, page = 0, slot = 0, head = 0;
};

/// The slots of a cache of codes [N, P, heads, D] and of its scales [N, P, heads].
class CodedSlots {
 public:
  CodedSlots(const Tensor& cache, const Tensor& scales)
      : capacity(cache.size(0) * cache.size(1)), is_float_(holds_float8(cache)) {
    STD_TORCH_CHECK(
        holds_codes(cache) && cache.dim() == 4 && cache.stride(3) == 1 && scales.dim() == 3 &&
            scales.scalar_type() == ScalarType::Float && scales.size(0) == cache.size(0) &&
            scales.size(1) == cache.size(1) && scales.size(2) == cache.size(2),
        "mtpc_cpu: expected a cache [N, P, H, D] of int8 or float8_e4m3fn, and float32 scales "
        "[N, P, H]");
    codes_ = {static_cast<Code*>(cache.mutable_data_ptr()), cache};
    scales_ = {static_cast<float*>(scales.mutable_data_ptr()), scales};
  }

  /// Writes a head's row.
  template <class T>
  void write(int64_t slot, int64_t head, const T* row, int64_t width) const {
    float& scale = *scales_.at(slot, head);
    Code* to = codes_.at(slot, head);
    if (is_float_) {
      scale = write_codes(row, width, true, to);
      return;
    }
    static thread_local Buffer<float> memory;
    float* wide = memory.reserve(width);
    std::copy(row, row + width, wide);
    spread(wide, width);
    scale = write_codes(wide, width, false, to);
  }

  int64_t capacity;

 private:
  bool is_float_;
  Places<Code> codes_;
  Places<float> scales_;
};

/// The numbers of a register's worth of codes, without their scale.
template <bool kFloat>
inline Vec<float> widen(const Code* p) {
  if constexpr (!kFloat) {
    return __builtin_convertvector(
        widen_bytes(reinterpret_cast<const int8_t*>(p)), Vec<float>);
  }
  const Mask<float> codes = widen_bytes(&p->bits);
  const Mask<float> magnitudes = codes & 0x7f;
  // A float has the same form with a larger bias. Codes below 8 have no leading one.
  const Vec<float> normal = reinterpret_cast<Vec<float>>((magnitudes << 20) + (120 << 23));
  const Vec<float> small = __builtin_convertvector(magnitudes, Vec<float>) * 0x1p-9f;
  const Vec<float> sizes = magnitudes < 8 ? small : normal;
  return reinterpret_cast<Vec<float>>(reinterpret_cast<Mask<float>>(sizes) | (codes & 0x80) << 24);
}

/// The numbers of a row of codes. They have no more bits than the upper half of a float.
template <bool kFloat>
inline void expand_row(const Code* from, int64_t width, BFloat16* to) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Upper __attribute__((vector_size(kVectorBytes / 2)));
  const auto upper = [](const Code* p) {
    return __builtin_convertvector(reinterpret_cast<Bits>(widen<kFloat>(p)) >> 16, Upper);
  };
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 2 * kStep <= width; i += 2 * kStep) {
    const __m512bh both =
        _mm512_cvtne2ps_pbh(widen<kFloat>(from + i + kStep), widen<kFloat>(from + i));
    std::memcpy(to + i, &both, sizeof(both));
  }
#endif
  for (; i + kStep <= width; i += kStep) {
    const Upper numbers = upper(from + i);
    std::memcpy(to + i, &numbers, sizeof(numbers));
  }
  if (i < width) {
    Code last[kStep]{};
    std::memcpy(last, from + i, width - i);
    const Upper numbers = upper(last);
    std::memcpy(to + i, &numbers, (width - i) * sizeof(BFloat16));
  }
}

/// Rows of codes that are needed soon: one is fetched with each that is expanded.
struct CodesAhead {
  const Code* const* rows;
  int64_t shift, width;

  void fetch(int64_t row) const {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < width; i += kLine) __builtin_prefetch(rows[row] + shift + i, 0, 2);
  }
};

/// Expands rows [first, last) of a head into `to`, side by side, and says where they lie; null for
/// those that are null.
template <bool kFloat>
void expand_rows(const Code* const* rows, int64_t shift, int64_t first, int64_t last,
                 int64_t width, CodesAhead ahead, BFloat16* to, const BFloat16** places) {
  for (int64_t row = first; row < last; ++row, to += width) {
    places[row] = rows[row] == nullptr ? nullptr : to;
    if (rows[row] == nullptr) continue;
    ahead.fetch(row);
    expand_row<kFloat>(rows[row] + shift, width, to);
  }
}

}  // namespace mtpc
