// What the generated C functions are made of (generate.py), by which AOTInductor's packages call the
// kernels past torch's dispatcher.
//
// A call through the dispatcher is looked up, boxed and unboxed, which takes several microseconds; a
// step of 28 layers has hundreds of calls. Arguments are passed by AOTInductor's convention for its
// own shims: handles are borrowed, results are new handles, an optional tensor is a pointer to its
// handle, and a list of tensors comes with its length.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>
#include <type_traits>

#include "operators.h"

namespace mtpc {
namespace {

/// A second handle of a tensor, which whoever gets it deletes.
AtenTensorHandle own(AtenTensorHandle handle) {
  AtenTensorHandle result;
  const AOTITorchError error = aoti_torch_new_tensor_handle(handle, &result);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "mtpc_cpu: a tensor's handle is none");
  return result;
}

Tensor borrow(AtenTensorHandle handle) { return Tensor(own(handle)); }

std::optional<Tensor> borrow(AtenTensorHandle* handle) {
  return handle ? std::optional(borrow(*handle)) : std::nullopt;
}

int64_t borrow(int64_t value) { return value; }
double borrow(double value) { return value; }
bool borrow(int32_t value) { return value != 0; }

const char* borrow(const char* value) { return value; }

/// A list of tensors.
struct Handles {
  const AtenTensorHandle* first;
  int64_t count;
};

std::vector<Tensor> borrow(Handles handles) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < handles.count; ++i) tensors.push_back(borrow(handles.first[i]));
  return tensors;
}

/// Calls a kernel, and puts a new handle of each result into its place; the place of a kernel that
/// has no result is set to null. What a kernel throws goes through the generated code to the caller
/// of the package.
template <size_t kPlaces, class Kernel, class... Arguments>
AOTITorchError call(
    AtenTensorHandle* const (&places)[kPlaces], Kernel kernel, Arguments... arguments) {
  using Result = decltype(kernel(borrow(arguments)...));
  if constexpr (std::is_void_v<Result>) {
    kernel(borrow(arguments)...);
    if (places[0]) *places[0] = nullptr;
  } else if constexpr (std::is_same_v<Result, Tensor>) {
    *places[0] = own(kernel(borrow(arguments)...).get());
  } else {
    static_assert(std::tuple_size_v<Result> == kPlaces);
    const Result results = kernel(borrow(arguments)...);
    AtenTensorHandle* const* place = places;
    std::apply([&](const auto&... each) { ((**place++ = own(each.get())), ...); }, results);
  }
  return AOTI_TORCH_SUCCESS;
}

}  // namespace
}  // namespace mtpc
