// Helpers between tensors of run-time dtype and the typed kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "simd.h"

namespace mtpc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
struct Type {
  using type = T;
};

/// Calls body(Type<T>{}) with the C++ type of a floating-point dtype.
template <class Body>
void with_type(ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(Type<float>{});
    case ScalarType::BFloat16:
      return body(Type<BFloat16>{});
    case ScalarType::Half:
      return body(Type<Half>{});
    case ScalarType::Double:
      return body(Type<double>{});
    default:
      STD_TORCH_CHECK(
          false, "mtpc_cpu: expected float32, bfloat16, float16 or float64, found ",
          torch::headeronly::toString(dtype));
  }
}

/// The tensor, copied only if the elements of its last dimension are not adjacent in memory.
inline Tensor adjacent_last(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

/// The tensor, copied only if it is not dense.
inline Tensor as_dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

/// The tensor, copied only if it is not dense or has another dtype.
inline Tensor dense_in(const Tensor& t, ScalarType dtype) {
  const Tensor cast = t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
  return as_dense(cast);
}

/// How many rows of `width` elements a tensor has.
inline int64_t count_rows(const Tensor& t, int64_t width) {
  return width == 0 ? 0 : t.numel() / width;
}

/// Uninitialised and dense. `torch::stable::new_empty` goes through the dispatcher, which takes 25
/// microseconds if a stream of weights has just evicted its code from the caches.
inline Tensor dense_empty(const std::vector<int64_t>& shape, int32_t dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

/// The same, of x's dtype.
inline Tensor dense_empty(const Tensor& x, const std::vector<int64_t>& shape) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dense_empty(shape, dtype);
}

/// The same, filled with zeros; on torch's threads if they are many.
inline Tensor dense_zeros(const Tensor& x, const std::vector<int64_t>& shape) {
  constexpr int64_t kMany = 1 << 16;
  int64_t bytes = x.element_size();
  for (const int64_t size : shape) bytes *= size;
  if (bytes == 0 || bytes > kMany) return torch::stable::new_zeros(x, shape);
  const Tensor zeros = dense_empty(x, shape);
  std::memset(zeros.mutable_data_ptr(), 0, bytes);
  return zeros;
}

/// Sizes of all dimensions but the last.
inline std::vector<int64_t> leading_sizes(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) sizes.push_back(x.size(dim));
  return sizes;
}

/// Uninitialised, of x's dtype and of its shape except for the last dimension.
inline Tensor empty_rows(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape = leading_sizes(x);
  shape.push_back(last);
  return dense_empty(x, shape);
}

/// Reads an int32 or int64 tensor of one or two dimensions in place, whatever its strides.
class Indices {
 public:
  Indices(const Tensor& t, const char* name, int64_t dim)
      : data_(t.const_data_ptr()), wide_(t.scalar_type() == ScalarType::Long) {
    STD_TORCH_CHECK(
        t.dim() == dim && (wide_ || t.scalar_type() == ScalarType::Int), "mtpc_cpu: ", name,
        " must be an int32 or int64 tensor of ", dim, " dimensions");
    outer_ = t.stride(0);
    inner_ = dim > 1 ? t.stride(1) : 0;
  }

  int64_t operator()(int64_t i, int64_t j = 0) const {
    const int64_t offset = i * outer_ + j * inner_;
    return wide_ ? static_cast<const int64_t*>(data_)[offset]
                 : static_cast<const int32_t*>(data_)[offset];
  }

 private:
  const void* data_;
  bool wide_;
  int64_t outer_ = 0;
  int64_t inner_ = 0;
};

/// How many leading rows are in use: the one integer of `count`, or all without a count. The others
/// are neither read nor written.
inline int64_t used_rows(const std::optional<Tensor>& count, int64_t rows) {
  if (!count) return rows;
  STD_TORCH_CHECK(count->numel() == 1, "mtpc_cpu: rows must be one integer");
  return std::clamp<int64_t>(Indices(*count, "rows", 1)(0), 0, rows);
}

/// The same of x [..., N]'s rows of N.
inline int64_t used_rows_of(const Tensor& x, const std::optional<Tensor>& count) {
  return used_rows(count, count_rows(x, x.size(x.dim() - 1)));
}

/// Reads `count` adjacent elements of a tensor of any supported dtype.
template <class A>
void read(A* to, const Tensor& from, int64_t offset, int64_t count) {
  with_type(from.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* source = static_cast<const T*>(from.const_data_ptr()) + offset;
    std::transform(source, source + count, to, [](T x) { return static_cast<A>(x); });
  });
}

/// Rounds `count` adjacent elements.
template <class T, class A>
void round_to(T* to, const A* from, int64_t count) {
  int64_t done = 0;
  if constexpr (std::is_same_v<A, float> && std::is_same_v<T, BFloat16>) {
    for (; done + kLanes<float> <= count; done += kLanes<float>) {
      narrow(to + done, load<float>(from + done));
    }
  }
  std::transform(from + done, from + count, to + done, [](A x) { return static_cast<T>(x); });
}

/// Writes `count` adjacent elements, rounding to the tensor's dtype.
template <class A>
void write(const Tensor& to, int64_t offset, const A* from, int64_t count) {
  with_type(to.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    round_to(static_cast<T*>(to.mutable_data_ptr()) + offset, from, count);
  });
}

/// Uninitialised memory for `size` elements on a cache-line boundary.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) { reserve(size); }

  T* reserve(int64_t size) {
    if (size > size_) {
      const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + 63) / 64 * 64;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      STD_TORCH_CHECK(data_ != nullptr, "mtpc_cpu: out of memory, wanted ", bytes, " bytes");
      size_ = size;
    }
    return data_.get();
  }

  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

/// How many threads a call takes: one per kGrain multiply-adds, which take a few microseconds.
inline int64_t worker_count(int64_t multiply_adds) {
  constexpr int64_t kGrain = 1 << 17;
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp<int64_t>(multiply_adds / kGrain, 1, threads);
}

/// Runs body(0..count, state) on torch's own threads, each with a State of its own. A free thread
/// takes the next task, so tasks may differ in size. Each task must write memory of its own. The
/// result then depends neither on the number of threads nor on which thread ran which task.
template <class State, class Body>
void run_tasks(int64_t count, int64_t workers, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto drain = [&](int64_t, int64_t) {
    State state;
    for (int64_t task = next++; task < count; task = next++) body(task, state);
  };
  if (workers <= 1 || count <= 1) {
    drain(0, 1);
  } else {
    torch::stable::parallel_for(0, std::min(workers, count), 1, drain);
  }
}

/// The state of tasks that need none.
struct Nothing {};

template <class Body>
void run_tasks(int64_t count, int64_t workers, const Body& body) {
  run_tasks<Nothing>(count, workers, [&](int64_t task, Nothing&) { body(task); });
}

/// Adjacent tasks.
struct Tasks {
  int64_t first, count;
};

/// One worker's tasks that are still to do, [first, last).
class Share {
 public:
  void set(uint64_t first, uint64_t last) { span_ = first << 32 | last; }

  /// Takes the first tasks left, a quarter of them but at most `most`. The owner calls this, and goes
  /// through its share in order. Near the end it takes few at a time, so that others can help.
  Tasks take_first(int64_t most) {
    uint64_t span = span_;
    while (first(span) < last(span)) {
      const int64_t count = std::clamp<int64_t>((last(span) - first(span)) / 4, 1, most);
      const uint64_t rest = span + (static_cast<uint64_t>(count) << 32);
      if (span_.compare_exchange_weak(span, rest)) return {first(span), count};
    }
    return {0, 0};
  }

  /// Takes the last task left, if any. Workers that have finished their own share call this.
  Tasks take_last() {
    uint64_t span = span_;
    while (first(span) < last(span)) {
      if (span_.compare_exchange_weak(span, span - 1)) return {last(span) - 1, 1};
    }
    return {0, 0};
  }

 private:
  static int64_t first(uint64_t span) { return span >> 32; }
  static int64_t last(uint64_t span) { return span & 0xffffffff; }

  alignas(64) std::atomic<uint64_t> span_{0};
};

/// As `run_tasks`, where adjacent tasks read adjacent memory: each worker goes through a share of
/// its own, one long stream that the processor prefetches. A worker that has finished helps others
/// from the far ends of their shares, because a thread may start late or run on a slower core. The
/// body gets runs of up to `most` adjacent tasks.
template <class State, class Body>
void run_stream_in_runs(int64_t count, int64_t workers, int64_t most, const Body& body) {
  workers = std::min(workers, count);
  if (workers <= 1) {
    State state;
    for (int64_t task = 0; task < count; task += most) {
      body(Tasks{task, std::min(most, count - task)}, state);
    }
    return;
  }
  std::vector<Share> shares(workers);
  for (int64_t w = 0; w < workers; ++w) {
    shares[w].set(count * w / workers, count * (w + 1) / workers);
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    State state;
    for (int64_t own = next++; own < workers; own = next++) {
      for (Tasks run; (run = shares[own].take_first(most)).count > 0;) body(run, state);
    }
    for (Share& share : shares) {
      for (Tasks run; (run = share.take_last()).count > 0;) body(run, state);
    }
  });
}

template <class State, class Body>
void run_stream(int64_t count, int64_t workers, const Body& body) {
  run_stream_in_runs<State>(count, workers, 1, [&](Tasks run, State& state) {
    body(run.first, state);
  });
}

template <class Body>
void run_stream(int64_t count, int64_t workers, const Body& body) {
  run_stream<Nothing>(count, workers, [&](int64_t task, Nothing&) { body(task); });
}

}  // namespace mtpc
