// The calls of a tape between kernels: arithmetic by elements, folds along a dimension, rows by
// index. Almost all of them work on the few integers of metadata.
//
// A value's bits depend on its operands' values alone, not on its place in a tensor or on how many
// threads there are: functions are computed on whole registers, and sums in one order.
#include "tape.h"
#include "tensors.h"

#include <array>
#include <cmath>

namespace mtpc {
namespace {

constexpr int64_t kBlock = 256;

/// Calls body(Type<T>{}) with the C++ type of any dtype that a step has.
template <class Body>
void with_any_type(int64_t dtype, Body&& body) {
  switch (static_cast<ScalarType>(dtype)) {
    case ScalarType::Bool:
      return body(Type<bool>{});
    case ScalarType::Byte:
      return body(Type<uint8_t>{});
    case ScalarType::Char:
      return body(Type<int8_t>{});
    case ScalarType::Int:
      return body(Type<int32_t>{});
    case ScalarType::Long:
      return body(Type<int64_t>{});
    default:
      return with_type(static_cast<ScalarType>(dtype), body);
  }
}

template <class A>
void fetch(A* to, const Operand& from, int64_t offset, int64_t stride, int64_t count) {
  with_any_type(from.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* source = reinterpret_cast<const T*>(from.data) + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<A>(source[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<A>(source[i * stride]);
    }
  });
}

template <class A>
void put(const Operand& to, int64_t offset, int64_t stride, const A* from, int64_t count) {
  with_any_type(to.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* target = reinterpret_cast<T*>(to.data) + offset;
    if (stride == 1) {
      round_to(target, from, count);
    } else {
      for (int64_t i = 0; i < count; ++i) target[i * stride] = static_cast<T>(from[i]);
    }
  });
}

/// A block of values of each operand.
template <class A>
struct Block {
  alignas(64) A values[kMostOperands][kBlock];
};

template <class A, class Each>
void each(Block<A>& block, int64_t count, Each function) {
  A* out = block.values[0];
  const A *a = block.values[1], *b = block.values[2], *c = block.values[3];
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<A>(function(a[i], b[i], c[i]));
}

template <class A>
A floor_divide(A a, A b) {
  STD_TORCH_CHECK(b != 0, "mtpc_cpu: division of an integer by zero");
  const A quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

/// Functions of integers and of floating-point numbers alike.
template <class A>
void apply_any(Function function, Block<A>& block, int64_t n) {
  switch (function) {
    case Function::kCopy:
      return each(block, n, [](A a, A, A) { return a; });
    case Function::kNeg:
      return each(block, n, [](A a, A, A) { return -a; });
    case Function::kLogicalNot:
      return each(block, n, [](A a, A, A) { return a == 0; });
    case Function::kAdd:
      return each(block, n, [](A a, A b, A) { return a + b; });
    case Function::kSub:
      return each(block, n, [](A a, A b, A) { return a - b; });
    case Function::kMul:
      return each(block, n, [](A a, A b, A) { return a * b; });
    case Function::kMinimum:  // NaN where either is.
      return each(block, n, [](A a, A b, A) { return a < b || a != a ? a : b; });
    case Function::kMaximum:
      return each(block, n, [](A a, A b, A) { return a > b || a != a ? a : b; });
    case Function::kEq:
      return each(block, n, [](A a, A b, A) { return a == b; });
    case Function::kNe:
      return each(block, n, [](A a, A b, A) { return a != b; });
    case Function::kLt:
      return each(block, n, [](A a, A b, A) { return a < b; });
    case Function::kLe:
      return each(block, n, [](A a, A b, A) { return a <= b; });
    case Function::kGt:
      return each(block, n, [](A a, A b, A) { return a > b; });
    case Function::kGe:
      return each(block, n, [](A a, A b, A) { return a >= b; });
    case Function::kWhere:
      return each(block, n, [](A a, A b, A c) { return a != 0 ? b : c; });
    default:
      STD_TORCH_CHECK(false, "mtpc_cpu: a tape's function ", static_cast<int64_t>(function),
                      " is not one of these numbers");
  }
}

void apply(Function function, Block<int64_t>& block, int64_t n) {
  using A = int64_t;
  switch (function) {
    case Function::kNot:
      return each(block, n, [](A a, A, A) { return ~a; });
    case Function::kIsFinite:
      return each(block, n, [](A, A, A) { return 1; });
    case Function::kAnd:
      return each(block, n, [](A a, A b, A) { return a & b; });
    case Function::kOr:
      return each(block, n, [](A a, A b, A) { return a | b; });
    case Function::kFloorDivide:
      return each(block, n, [](A a, A b, A) { return floor_divide(a, b); });
    case Function::kRemainder:
      return each(block, n, [](A a, A b, A) { return a - floor_divide(a, b) * b; });
    default:
      return apply_any(function, block, n);
  }
}

/// function(register) over a block, whose end may be garbage.
template <class A, class Each>
void each_register(Block<A>& block, int64_t count, Each function) {
  for (int64_t i = 0; i < count; i += kLanes<A>) {
    store(block.values[0] + i, function(load<A>(block.values[1] + i)));
  }
}

template <class A>
void apply(Function function, Block<A>& block, int64_t n) {
  using V = Vec<A>;
  switch (function) {
    case Function::kIsFinite:
      return each(block, n, [](A a, A, A) { return std::isfinite(a); });
    case Function::kDiv:
      return each(block, n, [](A a, A b, A) { return a / b; });
    case Function::kSqrt:
      return each(block, n, [](A a, A, A) { return std::sqrt(a); });
    case Function::kRsqrt:
      return each(block, n, [](A a, A, A) { return 1 / std::sqrt(a); });
    case Function::kCos:
      return each(block, n, [](A a, A, A) { return std::cos(a); });
    case Function::kSin:
      return each(block, n, [](A a, A, A) { return std::sin(a); });
    case Function::kExp:
      return each_register(block, n, [](V a) { return exp(a); });
    case Function::kSigmoid:
      return each_register(block, n, [](V a) { return 1 / (exp(-a) + 1); });
    case Function::kSilu:
      return each_register(block, n, [](V a) { return a / (exp(-a) + 1); });
    case Function::kSoftplus:  // As PyTorch: of large numbers, they themselves.
      return each(block, n, [](A a, A, A) { return a > 20 ? a : std::log1p(std::exp(a)); });
    default:
      return apply_any(function, block, n);
  }
}

/// Goes over a range of places of a shape, in runs along the last dimension. body(offsets, count)
/// gets the offset of each operand.
template <int kOperands, class Body>
void for_runs(const int64_t* sizes, int64_t dims, const Operand* operands, int64_t first,
              int64_t last, int64_t most, const Body& body) {
  const int64_t inner = sizes[dims - 1];
  while (first < last) {
    const int64_t start = first % inner;
    std::array<int64_t, kOperands> offsets{};
    int64_t rest = first / inner;
    for (int k = 0; k < kOperands; ++k) offsets[k] = start * operands[k].strides[dims - 1];
    for (int64_t dim = dims - 2; dim >= 0; --dim) {
      const int64_t at = rest % sizes[dim];
      rest /= sizes[dim];
      for (int k = 0; k < kOperands; ++k) offsets[k] += at * operands[k].strides[dim];
    }
    const int64_t count = std::min({inner - start, last - first, most});
    body(offsets, count);
    first += count;
  }
}

int64_t count_places(const int64_t* sizes, int64_t dims) {
  int64_t count = 1;
  for (int64_t dim = 0; dim < dims; ++dim) count *= sizes[dim];
  return count;
}

/// body(first, last) over ranges of `count` places, on torch's threads where it is worth it.
template <class Body>
void for_ranges(int64_t count, int64_t cost, const Body& body) {
  constexpr int64_t kRange = 1 << 13;
  const int64_t workers = worker_count(count * cost);
  if (workers <= 1) return body(0, count);
  run_tasks((count + kRange - 1) / kRange, workers, [&](int64_t task) {
    body(task * kRange, std::min(count, (task + 1) * kRange));
  });
}

int64_t operand_count(Function function) {
  return function < Function::kAdd ? 2 : function < Function::kWhere ? 3 : 4;
}

template <class A>
void run_map(const Map& map) {
  constexpr int64_t kCost = 8;
  const int64_t operands = operand_count(map.function), last = map.dims - 1;
  for_ranges(count_places(map.sizes, map.dims), kCost, [&](int64_t from, int64_t to) {
    Block<A> block;
    for_runs<kMostOperands>(
        map.sizes, map.dims, map.operands, from, to, kBlock, [&](const auto& at, int64_t n) {
          for (int64_t k = 1; k < operands; ++k) {
            fetch(block.values[k], map.operands[k], at[k], map.operands[k].strides[last], n);
          }
          apply(map.function, block, n);
          put(map.operands[0], at[0], map.operands[0].strides[last], block.values[0], n);
        });
  });
}

template <class A>
A fold_two(Folding folding, A a, A b) {
  switch (folding) {
    case Folding::kMaximum:
      return a > b || a != a ? a : b;
    case Folding::kMinimum:
      return a < b || a != a ? a : b;
    case Folding::kAny:
      return a != 0 || b != 0;
    case Folding::kAll:
      return a != 0 && b != 0;
    default:
      return a + b;
  }
}

/// totals = totals folded with a term each; the first term of a sum or of a maximum is the total.
template <class A>
void fold_in(Folding folding, bool is_first, const A* terms, A* totals, int64_t count) {
  if (is_first && folding < Folding::kAny) {
    std::copy_n(terms, count, totals);
    return;
  }
  if (is_first) std::fill_n(totals, count, static_cast<A>(folding == Folding::kAll));
  for (int64_t i = 0; i < count; ++i) totals[i] = fold_two(folding, totals[i], terms[i]);
}

/// A fold whose results lie beside each other, and whose terms do not: many results at once.
template <class A>
void fold_beside(const Fold& fold, int64_t rows) {
  const int64_t last = fold.dims - 1, length = fold.sizes[last];
  const int64_t from = fold.operands[1].strides[last], to = fold.operands[0].strides[last];
  const int64_t step = fold.operands[0].strides[last - 1];
  for_ranges(rows, length, [&](int64_t first, int64_t end) {
    for_runs<2>(fold.sizes, last, fold.operands, first, end, kBlock, [&](const auto& at, int64_t n) {
      A block[kBlock], totals[kBlock];
      for (int64_t term = 0; term < length; ++term) {
        fetch(block, fold.operands[1], at[1] + term * from, 1, n);
        fold_in(fold.folding, term == 0, block, totals, n);
        if (fold.folding == Folding::kScan) {
          put(fold.operands[0], at[0] + term * to, step, totals, n);
        }
      }
      if (fold.folding != Folding::kScan) put(fold.operands[0], at[0], step, totals, n);
    });
  });
}

/// Sums of floats are added as doubles, one term after the other.
template <class A>
void run_fold(const Fold& fold) {
  const int64_t last = fold.dims - 1, length = fold.sizes[last];
  const int64_t from = fold.operands[1].strides[last], to = fold.operands[0].strides[last];
  const int64_t rows = count_places(fold.sizes, last);
  if (last > 0 && from != 1 && fold.operands[1].strides[last - 1] == 1) {
    return fold_beside<A>(fold, rows);
  }
  int64_t sizes[kMostDims];
  Operand operands[2] = {fold.operands[0], fold.operands[1]};
  std::copy(fold.sizes, fold.sizes + last, sizes);
  sizes[last] = 1;
  for_ranges(rows, length, [&](int64_t first, int64_t end) {
    for_runs<2>(sizes, fold.dims, operands, first, end, 1, [&](const auto& at, int64_t) {
      A block[kBlock], total = fold.folding == Folding::kAll;
      for (int64_t done = 0; done < length; done += kBlock) {
        const int64_t count = std::min(kBlock, length - done);
        fetch(block, fold.operands[1], at[1] + done * from, from, count);
        for (int64_t i = 0; i < count; ++i) {
          const bool is_first = done + i == 0 && fold.folding < Folding::kAny;
          total = is_first ? block[i] : fold_two(fold.folding, total, block[i]);
          block[i] = total;
        }
        if (fold.folding == Folding::kScan) {
          put(fold.operands[0], at[0] + done * to, to, block, count);
        }
      }
      if (fold.folding != Folding::kScan) put(fold.operands[0], at[0], 1, &total, 1);
    });
  });
}

/// How many of the last dimensions of a row lie densely in both, as elements.
int64_t dense_tail(const MoveRows& move, int64_t& dims) {
  int64_t dense = 1;
  dims = move.dims;
  while (dims > move.index_dims &&
         (move.sizes[dims - 1] == 1 || (move.rows.strides[dims - 1] == dense &&
                                        move.table.strides[dims - 1] == dense))) {
    dense *= move.sizes[--dims];
  }
  return dense;
}

void run_move(const MoveRows& move) {
  int64_t dims;
  const int64_t bytes = dense_tail(move, dims) * move.element_bytes;
  Operand operands[2 + kMostIndices] = {move.rows, move.table};
  std::copy(move.index, move.index + kMostIndices, operands + 2);
  int64_t sizes[kMostDims + 1] = {};
  std::copy(move.sizes, move.sizes + dims, sizes);
  if (dims == 0) sizes[dims++] = 1;
  for_ranges(count_places(sizes, dims), bytes, [&](int64_t first, int64_t last) {
    for_runs<2 + kMostIndices>(sizes, dims, operands, first, last, 1, [&](const auto& at, int64_t) {
      int64_t place = at[1];
      for (int64_t k = 0; k < move.indices; ++k) {
        int64_t index;
        fetch(&index, move.index[k], at[2 + k], 1, 1);
        const int64_t size = move.table_sizes[k];
        STD_TORCH_CHECK(index >= -size && index < size, "mtpc_cpu: row ", index,
                        " of a table of ", size, " rows");
        place += (index < 0 ? index + size : index) * move.table_strides[k];
      }
      char* row = move.rows.data + at[0] * move.element_bytes;
      char* entry = move.table.data + place * move.element_bytes;
      std::memcpy(move.into_table ? entry : row, move.into_table ? row : entry, bytes);
    });
  });
}

template <class Body>
void with_arithmetic(Arithmetic arithmetic, const Body& body) {
  switch (arithmetic) {
    case Arithmetic::kIntegers:
      return body(Type<int64_t>{});
    case Arithmetic::kFloats:
      return body(Type<float>{});
    default:
      return body(Type<double>{});
  }
}

}  // namespace
}  // namespace mtpc

void mtpc_map(const mtpc::Map& map) {
  mtpc::with_arithmetic(map.arithmetic, [&](auto type) {
    mtpc::run_map<typename decltype(type)::type>(map);
  });
}

void mtpc_fold(const mtpc::Fold& fold) {
  const bool is_integer = fold.arithmetic == mtpc::Arithmetic::kIntegers;
  return is_integer ? mtpc::run_fold<int64_t>(fold) : mtpc::run_fold<double>(fold);
}

void mtpc_move_rows(const mtpc::MoveRows& move) { mtpc::run_move(move); }
