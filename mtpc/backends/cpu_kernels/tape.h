// The interface between the runner of tapes (runner.cpp) and the kernels: plain structs, and C
// functions that the runner finds by name.
//
// `mtpc_bind_NAME` makes a call of the kernel NAME past torch's dispatcher. A call through the
// dispatcher is looked up, boxed and unboxed, which takes several microseconds; a step of 28 layers has
// hundreds of calls. `mtpc_map`, `mtpc_fold` and `mtpc_move_rows` run the calls between kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace mtpc {

/// An argument of a kernel; its type in the operator's schema says which field is used.
struct Argument {
  /// A tensor; an optional one, null where there is none; or a list's first. Borrowed.
  const AtenTensorHandle* tensors = nullptr;
  /// How many tensors a list has.
  int64_t count = 0;
  /// An int or a bool.
  int64_t integer = 0;
  double number = 0;
  const char* text = nullptr;
};

/// A kernel with its arguments, as it takes them: tensors own memory, which each call would allocate.
struct BoundKernel {
  /// Calls the kernel; each place gets a new handle of a result.
  void (*call)(const void* arguments, AtenTensorHandle* const* places) = nullptr;
  void (*release)(const void* arguments) = nullptr;
  const void* arguments = nullptr;
};

using BindKernel = BoundKernel(const Argument* arguments);

inline constexpr int kMostDims = 8, kMostOperands = 4, kMostIndices = 4;

/// A tensor's memory, with a stride, in elements, for each dimension of what is computed.
struct Operand {
  char* data = nullptr;
  /// A torch::headeronly::ScalarType.
  int64_t dtype = 0;
  int64_t strides[kMostDims] = {};
};

enum class Arithmetic : int64_t { kIntegers, kFloats, kDoubles };

enum class Function : int64_t {
  // Of one operand.
  kCopy, kNeg, kNot, kLogicalNot, kIsFinite, kCos, kSin, kExp, kSqrt, kRsqrt, kSigmoid, kSilu,
  kSoftplus,
  // Of two.
  kAdd, kSub, kMul, kDiv, kFloorDivide, kRemainder, kMinimum, kMaximum, kAnd, kOr,
  kEq, kNe, kLt, kLe, kGt, kGe,
  // Of three.
  kWhere,
  kCount
};

/// operands[0] = function(operands[1], ...), element by element, over `sizes`.
struct Map {
  Function function;
  Arithmetic arithmetic;
  int64_t dims;
  int64_t sizes[kMostDims];
  Operand operands[kMostOperands];
};

/// The reduction of a `Fold` along its last dimension. A scan writes each partial result.
enum class Folding : int64_t { kSum, kMaximum, kMinimum, kAny, kAll, kScan, kCount };

/// operands[0] = operands[1], folded along the last dimension, where the result has the stride 0
/// unless it is a scan.
struct Fold {
  Folding folding;
  Arithmetic arithmetic;
  int64_t dims;
  int64_t sizes[kMostDims];
  Operand operands[2];
};

/// rows[i] = table[index[i]], or the other way round.
struct MoveRows {
  /// Whether rows are written into the table.
  int64_t into_table;
  int64_t element_bytes;
  /// Dimensions of the index come first, those of a row after them.
  int64_t dims, index_dims;
  int64_t sizes[kMostDims];
  /// Strides of both over `sizes`; the table's are 0 along dimensions of the index.
  Operand rows, table;
  /// The number of index tensors, one for each leading dimension of the table; each comes with that
  /// dimension's size and stride. A negative index counts from the end.
  int64_t indices;
  Operand index[kMostIndices];
  int64_t table_sizes[kMostIndices], table_strides[kMostIndices];
};

}  // namespace mtpc

extern "C" {
AOTI_TORCH_EXPORT void mtpc_map(const mtpc::Map& map);
AOTI_TORCH_EXPORT void mtpc_fold(const mtpc::Fold& fold);
AOTI_TORCH_EXPORT void mtpc_move_rows(const mtpc::MoveRows& move);
}
