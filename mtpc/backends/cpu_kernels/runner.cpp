// Runs tapes: a step as a list of calls over memory that is planned ahead.
//
// Everything that does not change from run to run is made when the tape is loaded: tensors and
// views over bound, planned and returned memory, and each call's arguments. A run is a loop over
// calls. It is a method of a torch class, which runs without Python's lock, so that other threads
// go on, an event loop among them. Torch classes and torch's own operators are not part of
// libtorch's stable ABI, so this is a library of its own, for the one torch that it was built with.
//
// A tape comes from a file. Each number of it is checked here before it is used to access memory.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <torch/custom_class.h>

#include <deque>
#include <string>
#include <variant>
#include <vector>

#include "tape.h"

namespace mtpc {
namespace {

using Numbers = std::vector<int64_t>;
using torch::jit::IValue;

constexpr int64_t kNone = -1;

/// An argument as a tape writes it: the tag, then what belongs to it.
enum Tag : int64_t { kNothing, kTensor, kInteger, kReal, kBoolean, kText, kList };

double as_double(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class F>
F* find_function(const std::string& name) {
  void* found = dlsym(RTLD_DEFAULT, name.c_str());
  TORCH_CHECK(found, "the tape calls ", name, ", which no loaded library has");
  return reinterpret_cast<F*>(found);
}

/// A call of an operator of torch.
struct Operator {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments;
  std::vector<int64_t> results;
};

/// What a collective calls instead of its kernel where its process group shares no memory.
struct Unshared {
  int64_t (*shares_memory)(const char* group);
  std::string group;
  Operator reference;
};

/// A call of a kernel: its arguments and the places of its results.
struct ReleaseKernel {
  void operator()(BoundKernel* bound) const {
    bound->release(bound->arguments);
    delete bound;
  }
};

/// Values as kernels take them, while a kernel is bound to them.
class BoundArguments {
 public:
  std::unique_ptr<BoundKernel, ReleaseKernel> bind(
      const torch::jit::Stack& values, BindKernel& bind) {
    std::vector<Argument> arguments;
    for (const IValue& value : values) arguments.push_back(add(value));
    return std::unique_ptr<BoundKernel, ReleaseKernel>(new BoundKernel(bind(arguments.data())));
  }

 private:
  Argument add(const IValue& value) {
    Argument argument;
    if (value.isTensor() || value.isTensorList()) {
      auto& handles = handles_.emplace_back();
      for (const at::Tensor& each :
           value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector()) {
        handles.push_back(reinterpret_cast<AtenTensorHandle>(&tensors_.emplace_back(each)));
      }
      argument.tensors = handles.data();
      argument.count = static_cast<int64_t>(handles.size());
    } else if (value.isInt()) {
      argument.integer = value.toInt();
    } else if (value.isBool()) {
      argument.integer = value.toBool();
    } else if (value.isDouble()) {
      argument.number = value.toDouble();
    } else if (value.isString()) {
      argument.text = value.toStringRef().c_str();
    } else {
      TORCH_CHECK(value.isNone(), "a tape gives a kernel a ", value.tagKind());
    }
    return argument;
  }

  /// Deques, because the addresses of their elements stay.
  std::deque<at::Tensor> tensors_;
  std::deque<std::vector<AtenTensorHandle>> handles_;
};

struct Kernel {
  /// Its name in profiles.
  std::string name;
  std::unique_ptr<BoundKernel, ReleaseKernel> bound;
  std::vector<int64_t> results;
  std::vector<AtenTensorHandle> made;
  std::vector<AtenTensorHandle*> places;
  /// Set for a collective.
  std::optional<Unshared> unshared;
};

struct Pointer {
  Operand* operand;
  int64_t storage;
  int64_t bytes;
};

template <class Instruction>
struct Moving {
  std::unique_ptr<Instruction> instruction;
  void (*function)(const Instruction&);
  std::vector<Pointer> pointers;
};

/// Frees returned memory that no later call reads.
struct Release {
  std::vector<int64_t> storages;
};

using Call = std::variant<Kernel, Operator, Moving<Map>, Moving<Fold>, Moving<MoveRows>, Release>;

}  // namespace

class Tape : public torch::CustomClassHolder {
 public:
  explicit Tape(int64_t arena_bytes)
      : arena_(at::empty({arena_bytes}, at::TensorOptions(at::kByte))) {}

  /// Memory of a tensor from outside, and whether calls may write it; returns the number of the
  /// storage.
  int64_t bound(at::Tensor tensor, bool is_writable) {
    TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kStrided, "tapes take tensors of the CPU");
    const int64_t size = tensor.element_size();
    int64_t extent = tensor.numel() > 0;
    for (int64_t dim = 0; extent > 0 && dim < tensor.dim(); ++dim) {
      extent += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    return add({tensor.storage(), tensor.storage_offset() * size, extent * size,
                tensor.scalar_type(), /*is_returned=*/false, is_writable});
  }

  /// A part of the arena.
  int64_t planned(int64_t offset, int64_t bytes) {
    TORCH_CHECK(offset >= 0 && bytes >= 0 && offset <= arena_.numel() - bytes && offset % 64 == 0,
                "a tape's memory from byte ", offset, " is outside its arena");
    return add({arena_.storage(), offset, bytes, {}, false, true});
  }

  /// Memory that a call returns.
  int64_t returned(int64_t bytes) {
    TORCH_CHECK(bytes >= 0, "a tape's storage has ", bytes, " bytes");
    auto impl = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, at::kCPU), nullptr, false);
    return add({c10::Storage(std::move(impl)), 0, bytes, {}, true, true, /*is_there=*/false});
  }

  /// Memory with numbers that never change: integers, or the bits of doubles.
  int64_t numbers(int64_t dtype, Numbers values) {
    TORCH_CHECK(dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::Undefined),
                "a tape's numbers have no dtype");
    const auto type = static_cast<at::ScalarType>(dtype);
    at::Tensor held = at::empty({count(values)}, at::TensorOptions(at::kLong));
    std::copy(values.begin(), values.end(), held.mutable_data_ptr<int64_t>());
    if (at::isFloatingType(type)) held = held.view(at::kDouble);
    return bound(held.to(type), /*is_writable=*/false);
  }

  /// A tensor, or a view, in a storage; returns its number.
  int64_t tensor(int64_t storage, int64_t dtype, Numbers sizes, Numbers strides, int64_t offset) {
    TORCH_CHECK(storage >= 0 && storage < count(storages_), "a tape has no storage ", storage);
    TORCH_CHECK(dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::Undefined) &&
                    sizes.size() == strides.size() && offset >= 0,
                "a tape's tensor has an unknown dtype, or sizes that do not fit its strides");
    const Memory& memory = storages_[storage];
    const auto type = static_cast<at::ScalarType>(dtype);
    const int64_t size = static_cast<int64_t>(c10::elementSize(type));
    check_extent(memory, sizes, strides, offset, size);
    TORCH_CHECK(!memory.dtype || memory.dtype == type, "a tape reads ", toString(*memory.dtype),
                " as ", toString(type));
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(memory.storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(type));
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(sizes, strides);
    impl->set_storage_offset(memory.offset / size + offset);
    tensors_.push_back(std::move(made));
    storage_of_.push_back(storage);
    return count(tensors_) - 1;
  }

  /// Adds a call of a kernel of mtpc.
  void kernel(std::string name, Numbers arguments, std::vector<std::string> texts,
              Numbers results) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
        ("mtpc_cpu::" + name).c_str(), "");
    const torch::jit::Stack values = read(handle.schema(), arguments, texts);
    const auto bind = find_function<BindKernel>("mtpc_bind_" + name);
    Kernel call{"mtpc_cpu::" + name, BoundArguments().bind(values, *bind)};
    TORCH_CHECK(handle.schema().returns().size() == results.size(), "a tape takes ",
                results.size(), " results of ", name);
    call.results = returned_slots(results, handle.schema());
    call.made.resize(results.size());
    for (AtenTensorHandle& made : call.made) call.places.push_back(&made);
    if (const auto group = handle.schema().argumentIndexWithName("group")) {
      const auto reference =
          c10::Dispatcher::singleton().findSchemaOrThrow(("mtpc::" + name).c_str(), "");
      call.unshared = Unshared{find_function<int64_t(const char*)>("mtpc_shares_memory"),
                               values[*group].toStringRef(),
                               {reference, values, call.results}};
    }
    calls_.push_back(std::move(call));
  }

  /// Adds a call of an operator of torch.
  void aten(std::string name, std::string overload, Numbers arguments,
            std::vector<std::string> texts, Numbers results) {
    const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    TORCH_CHECK(!handle.hasTag(at::Tag::inplace_view), "a tape calls ", name,
                ", which changes what a tensor is");
    Operator call{handle, read(handle.schema(), arguments, texts)};
    call.results = returned_slots(results, handle.schema());
    calls_.push_back(std::move(call));
  }

  /// operands: the result's number; then, for each operand, 1 and a tensor's number, or 0 and a
  /// number: the bits of a double, or an integer where `arithmetic` is on integers.
  void map(int64_t function, int64_t arithmetic, Numbers operands) {
    check_kind(function, static_cast<int64_t>(Function::kCount), arithmetic);
    Moving<Map> call{std::make_unique<Map>(), find_function<void(const Map&)>("mtpc_map")};
    Map& map = *call.instruction;
    map.function = static_cast<Function>(function);
    map.arithmetic = static_cast<Arithmetic>(arithmetic);
    const int64_t wanted = map.function < Function::kAdd ? 1 : map.function < Function::kWhere ? 2 : 3;
    TORCH_CHECK(count(operands) == 1 + 2 * wanted, "a tape's function has wrong operands");
    const at::Tensor& out = written(operands[0]);
    set_shape(map, out.sizes());
    point(call, &map.operands[0], operands[0], out.strides());
    for (int64_t k = 0; k < wanted; ++k) {
      Operand& operand = map.operands[k + 1];
      if (operands[1 + 2 * k]) {
        const int64_t number = operands[2 + 2 * k];
        point(call, &operand, number, slot(number).expand(out.sizes()).strides());
      } else {
        numbers_.push_back(operands[2 + 2 * k]);
        operand.data = reinterpret_cast<char*>(&numbers_.back());
        operand.dtype = static_cast<int64_t>(
            map.arithmetic == Arithmetic::kIntegers ? at::kLong : at::kDouble);
      }
    }
    squeeze(map);
    calls_.push_back(std::move(call));
  }

  /// A fold, or a scan, of a tensor along a dimension, which the result has with the size 1.
  void fold(int64_t folding, int64_t arithmetic, int64_t result, int64_t from, int64_t dim) {
    check_kind(folding, static_cast<int64_t>(Folding::kCount), arithmetic);
    Moving<Fold> call{std::make_unique<Fold>(), find_function<void(const Fold&)>("mtpc_fold")};
    Fold& fold = *call.instruction;
    fold.folding = static_cast<Folding>(folding);
    fold.arithmetic = static_cast<Arithmetic>(arithmetic);
    const at::Tensor &out = written(result), &in = slot(from);
    TORCH_CHECK(dim >= 0 && dim < in.dim() && in.size(dim) > 0, "a tape folds dimension ", dim);
    Numbers wanted = in.sizes().vec();
    if (fold.folding != Folding::kScan) wanted[dim] = 1;
    TORCH_CHECK(out.sizes() == at::IntArrayRef(wanted), "a tape's fold has a wrong result");
    set_shape(fold, in.sizes());
    point(call, &fold.operands[0], result, out.strides());
    point(call, &fold.operands[1], from, in.strides());
    std::swap(fold.sizes[dim], fold.sizes[in.dim() - 1]);
    for (Operand& each : fold.operands) std::swap(each.strides[dim], each.strides[in.dim() - 1]);
    calls_.push_back(std::move(call));
  }

  /// rows = table[index, ...], or the other way round: the table is indexed along its first
  /// dimensions.
  void move_rows(bool into_table, int64_t rows, int64_t table, Numbers indices) {
    Moving<MoveRows> call{std::make_unique<MoveRows>(),
                          find_function<void(const MoveRows&)>("mtpc_move_rows")};
    MoveRows& move = *call.instruction;
    const at::Tensor &to = slot(rows), &from = slot(table);
    written(into_table ? table : rows);
    const int64_t n = count(indices);
    TORCH_CHECK(n > 0 && n <= kMostIndices && n <= from.dim() && to.dtype() == from.dtype(),
                "a tape's table does not fit its rows or its number of indices");
    const int64_t row_dims = from.dim() - n, index_dims = to.dim() - row_dims;
    TORCH_CHECK(index_dims >= 0 && to.sizes().slice(index_dims) == from.sizes().slice(n),
                "a tape's rows have another shape than its table's");
    move.into_table = into_table;
    move.element_bytes = to.element_size();
    move.index_dims = index_dims;
    move.indices = n;
    set_shape(move, to.sizes());
    point(call, &move.rows, rows, to.strides());
    Numbers strides(to.dim(), 0);
    std::copy(from.strides().begin() + n, from.strides().end(), strides.begin() + index_dims);
    point(call, &move.table, table, strides);
    for (int64_t k = 0; k < n; ++k) {
      const at::Tensor& index = slot(indices[k]);
      TORCH_CHECK(index.dtype() == at::kLong || index.dtype() == at::kInt,
                  "a tape's index is neither int32 nor int64");
      point(call, &move.index[k], indices[k],
            index.expand(to.sizes().slice(0, index_dims)).strides());
      move.table_sizes[k] = from.size(k);
      move.table_strides[k] = from.stride(k);
    }
    calls_.push_back(std::move(call));
  }

  /// Returned memory may be freed.
  void release(Numbers storages) {
    for (const int64_t each : storages) {
      TORCH_CHECK(each >= 0 && each < count(storages_) && storages_[each].is_returned,
                  "a tape frees storage ", each);
      storages_[each].is_there = false;
    }
    calls_.push_back(Release{std::move(storages)});
  }

  void run() {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (Call& call : calls_) {
      std::visit([&](auto& each) { run_call(each); }, call);
    }
  }

 private:
  struct Memory {
    c10::Storage storage;
    int64_t offset, bytes;
    /// The dtype of a bound tensor.
    std::optional<at::ScalarType> dtype;
    bool is_returned, is_writable;
    /// Whether the calls so far have returned it, and not released it.
    bool is_there = true;
  };

  template <class T>
  static int64_t count(const T& items) {
    return static_cast<int64_t>(items.size());
  }

  int64_t add(Memory memory) {
    storages_.push_back(std::move(memory));
    return count(storages_) - 1;
  }

  static void check_extent(const Memory& memory, const Numbers& sizes, const Numbers& strides,
                           int64_t offset, int64_t size) {
    // Sizes of a tape are far below what could overflow here; larger ones are refused first.
    constexpr int64_t kMost = int64_t{1} << 46;
    double end = static_cast<double>(offset) + 1;
    bool is_empty = false;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      TORCH_CHECK(sizes[dim] >= 0 && sizes[dim] < kMost && strides[dim] >= 0 && strides[dim] < kMost,
                  "a tape's tensor has a size or stride of ", sizes[dim], ", ", strides[dim]);
      is_empty |= sizes[dim] == 0;
      end += static_cast<double>(sizes[dim] - 1) * static_cast<double>(strides[dim]);
    }
    TORCH_CHECK(is_empty || end * static_cast<double>(size) <= static_cast<double>(memory.bytes),
                "a tape's tensor ends at byte ", end * static_cast<double>(size), " of ",
                memory.bytes);
    TORCH_CHECK(memory.offset % size == 0, "a tape's tensor is not aligned");
  }

  const at::Tensor& slot(int64_t number) const {
    TORCH_CHECK(number >= 0 && number < count(tensors_), "a tape has no tensor ", number);
    return tensors_[number];
  }

  /// A tensor that a call reads or writes.
  const at::Tensor& used(int64_t number) const {
    const at::Tensor& tensor = slot(number);
    TORCH_CHECK(storages_[storage_of_[number]].is_there, "a call uses tensor ", number,
                ", whose memory no call has returned, or one has released");
    return tensor;
  }

  /// A tensor that a call writes.
  const at::Tensor& written(int64_t number) const {
    const at::Tensor& tensor = used(number);
    TORCH_CHECK(storages_[storage_of_[number]].is_writable, "a call writes tensor ", number,
                ", which lies in a weight or in numbers that never change");
    return tensor;
  }

  static void check_kind(int64_t function, int64_t count, int64_t arithmetic) {
    TORCH_CHECK(function >= 0 && function < count && arithmetic >= 0 && arithmetic <= 2,
                "a tape has function ", function, " of arithmetic ", arithmetic);
  }

  template <class Instruction>
  static void set_shape(Instruction& instruction, at::IntArrayRef sizes) {
    TORCH_CHECK(sizes.size() <= kMostDims, "a tape has a tensor of ", sizes.size(), " dimensions");
    instruction.dims = std::max<int64_t>(static_cast<int64_t>(sizes.size()), 1);
    instruction.sizes[0] = 1;
    std::copy(sizes.begin(), sizes.end(), instruction.sizes);
  }

  /// An operand that is a tensor.
  template <class Instruction>
  void point(Moving<Instruction>& call, Operand* operand, int64_t number, at::IntArrayRef strides) {
    const at::Tensor& tensor = used(number);
    const Memory& memory = storages_[storage_of_[number]];
    const int64_t bytes = tensor.storage_offset() * tensor.element_size();
    operand->dtype = static_cast<int64_t>(tensor.scalar_type());
    std::copy(strides.begin(), strides.end(), operand->strides);
    if (memory.is_returned) {
      call.pointers.push_back({operand, storage_of_[number], bytes});
    } else {
      operand->data = static_cast<char*>(memory.storage.mutable_data()) + bytes;
    }
  }

  /// Joins dimensions that lie one after the other in all operands.
  static void squeeze(Map& map) {
    int64_t kept = 0;
    for (int64_t dim = 1; dim < map.dims; ++dim) {
      bool joins = true;
      for (const Operand& each : map.operands) {
        joins &= map.sizes[kept] == 1 || each.strides[kept] == each.strides[dim] * map.sizes[dim];
      }
      if (!joins && map.sizes[dim] == 1) continue;
      if (!joins) ++kept;
      map.sizes[kept] = joins ? map.sizes[kept] * map.sizes[dim] : map.sizes[dim];
      for (Operand& each : map.operands) each.strides[kept] = each.strides[dim];
    }
    map.dims = kept + 1;
  }

  /// A call's arguments, checked against the operator's schema.
  torch::jit::Stack read(const c10::FunctionSchema& schema, const Numbers& code,
                         const std::vector<std::string>& texts) const {
    torch::jit::Stack stack;
    size_t at = 0;
    for (const c10::Argument& argument : schema.arguments()) {
      const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
      stack.push_back(read_value(code, at, texts, argument.type(), writes));
    }
    TORCH_CHECK(at == code.size(), "a tape's call of ", schema.name(), " has more arguments");
    schema.checkAndNormalizeInputs(stack);
    return stack;
  }

  static int64_t next(const Numbers& code, size_t& at) {
    TORCH_CHECK(at < code.size(), "a tape's call lacks an argument");
    return code[at++];
  }

  IValue read_value(const Numbers& code, size_t& at, const std::vector<std::string>& texts,
                    const c10::TypePtr& type, bool writes) const {
    const int64_t tag = next(code, at);
    if (tag == kNothing) return {};
    const int64_t value = next(code, at);
    switch (tag) {
      case kTensor:
        return writes ? written(value) : used(value);
      case kInteger:
        return value;
      case kReal:
        return as_double(value);
      case kBoolean:
        return value != 0;
      case kText:
        TORCH_CHECK(value >= 0 && value < count(texts), "a tape has no text ", value);
        return texts[value];
      default:
        TORCH_CHECK(tag == kList && value >= 0, "a tape's argument is of kind ", tag);
        return read_list(code, at, value, texts, type, writes);
    }
  }

  IValue read_list(const Numbers& code, size_t& at, int64_t length,
                   const std::vector<std::string>& texts, c10::TypePtr type, bool writes) const {
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    const auto list = type->cast<c10::ListType>();
    TORCH_CHECK(list, "a tape gives a list in place of ", type->str());
    c10::impl::GenericList made(list->getElementType());
    for (int64_t i = 0; i < length; ++i) {
      made.push_back(read_value(code, at, texts, list->getElementType(), writes));
    }
    return made;
  }

  /// Marks the memory of a call's results as returned. A result is -1 where it is not used, or
  /// where the call returns what it was given.
  Numbers returned_slots(Numbers results, const c10::FunctionSchema& schema) {
    TORCH_CHECK(count(results) <= count(schema.returns()), "a tape takes ", results.size(),
                " results of ", schema.name());
    for (const int64_t number : results) {
      if (number == kNone) continue;
      slot(number);  // Checks it.
      Memory& memory = storages_[storage_of_[number]];
      TORCH_CHECK(memory.is_returned, "a tape's result has no memory to be returned");
      memory.is_there = true;
    }
    return results;
  }

  void run_call(Kernel& call) {
    if (call.unshared && !call.unshared->shares_memory(call.unshared->group.c_str())) {
      return run_call(call.unshared->reference);
    }
    at::RecordFunction heard(at::RecordScope::FUNCTION);
    if (heard.isActive()) heard.before(call.name.c_str());
    call.bound->call(call.bound->arguments, call.places.data());
    for (size_t i = 0; i < call.results.size(); ++i) {
      const std::unique_ptr<at::Tensor> made(reinterpret_cast<at::Tensor*>(call.made[i]));
      if (call.results[i] != kNone) adopt(call.results[i], *made);
    }
  }

  void run_call(Operator& call) {
    torch::jit::Stack stack = call.arguments;
    call.handle.callBoxed(stack);
    for (size_t i = 0; i < call.results.size(); ++i) {
      if (call.results[i] != kNone) adopt(call.results[i], stack[i].toTensor());
    }
  }

  template <class Instruction>
  void run_call(Moving<Instruction>& call) {
    for (const Pointer& each : call.pointers) {
      char* data = static_cast<char*>(storages_[each.storage].storage.mutable_data());
      each.operand->data = data + each.bytes;
    }
    call.function(*call.instruction);
  }

  void run_call(const Release& call) {
    for (const int64_t each : call.storages) {
      storages_[each].storage.set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
    }
  }

  /// Whether two tensors of the same sizes have each element at the same place. The stride of a
  /// dimension of one element says nothing: operators and their fakes give it different values.
  static bool same_places(const at::Tensor& made, const at::Tensor& wanted) {
    for (int64_t i = 0; i < made.dim(); ++i) {
      if (made.size(i) > 1 && made.stride(i) != wanted.stride(i)) return false;
    }
    return made.storage_offset() == 0;
  }

  /// Takes over a result's memory, after a check that the result is what the tape says.
  void adopt(int64_t number, const at::Tensor& made) {
    const at::Tensor& wanted = tensors_[number];
    const Memory& taken = storages_[storage_of_[number]];
    TORCH_CHECK(made.sizes() == wanted.sizes() && made.scalar_type() == wanted.scalar_type() &&
                    same_places(made, wanted) && made.storage().use_count() == 1 &&
                    static_cast<int64_t>(made.storage().nbytes()) >= taken.bytes,
                "a call returned ", made.scalar_type(), made.sizes(), made.strides(), " in ",
                made.storage().nbytes(), " bytes where the tape has ", wanted.scalar_type(),
                wanted.sizes(), wanted.strides(), " in ", taken.bytes);
    const c10::Storage memory = made.storage();
    taken.storage.set_data_ptr_noswap(
        const_cast<c10::Storage&>(memory).set_data_ptr(at::DataPtr(nullptr, at::kCPU)));
  }

  at::Tensor arena_;
  std::vector<Memory> storages_;
  std::vector<at::Tensor> tensors_;
  Numbers storage_of_;
  std::deque<int64_t> numbers_;
  std::vector<Call> calls_;
};

}  // namespace mtpc

TORCH_LIBRARY(mtpc_runner, m) {
  m.class_<mtpc::Tape>("Tape")
      .def(torch::init<int64_t>())
      .def("bound", &mtpc::Tape::bound)
      .def("planned", &mtpc::Tape::planned)
      .def("returned", &mtpc::Tape::returned)
      .def("numbers", &mtpc::Tape::numbers)
      .def("tensor", &mtpc::Tape::tensor)
      .def("kernel", &mtpc::Tape::kernel)
      .def("aten", &mtpc::Tape::aten)
      .def("map", &mtpc::Tape::map)
      .def("fold", &mtpc::Tape::fold)
      .def("move_rows", &mtpc::Tape::move_rows)
      .def("release", &mtpc::Tape::release)
      .def("run", &mtpc::Tape::run);
}
