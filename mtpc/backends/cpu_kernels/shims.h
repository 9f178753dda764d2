// Templates of the generated C functions (generate.py) by which tapes call the kernels.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "operators.h"
#include "tape.h"

namespace mtpc {
namespace {

/// A second handle of a tensor. The receiver deletes it.
AtenTensorHandle own(AtenTensorHandle handle) {
  AtenTensorHandle result;
  const AOTITorchError error = aoti_torch_new_tensor_handle(handle, &result);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "mtpc_cpu: a tensor's handle could not be copied");
  return result;
}

/// An argument as a kernel's parameter of type T.
template <class T>
T take(const Argument& argument) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(own(*argument.tensors));
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    return argument.tensors ? std::optional(Tensor(own(*argument.tensors))) : std::nullopt;
  } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
    std::vector<Tensor> tensors;
    for (int64_t i = 0; i < argument.count; ++i) tensors.emplace_back(own(argument.tensors[i]));
    return tensors;
  } else if constexpr (std::is_same_v<T, double>) {
    return argument.number;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return argument.text;
  } else {
    static_assert(std::is_integral_v<T>);
    return static_cast<T>(argument.integer);
  }
}

template <class Result, class... Parameters, size_t... kIndex>
void call(Result (*kernel)(Parameters...), const Argument* arguments,
          AtenTensorHandle* const* places, std::index_sequence<kIndex...>) {
  if constexpr (std::is_void_v<Result>) {
    kernel(take<std::decay_t<Parameters>>(arguments[kIndex])...);
  } else if constexpr (std::is_same_v<Result, Tensor>) {
    *places[0] = own(kernel(take<std::decay_t<Parameters>>(arguments[kIndex])...).get());
  } else {
    const Result results = kernel(take<std::decay_t<Parameters>>(arguments[kIndex])...);
    std::apply([&](const auto&... each) { ((**places++ = own(each.get())), ...); }, results);
  }
}

/// Calls a kernel, and puts a new handle of each result into its place.
template <class Result, class... Parameters>
void call(Result (*kernel)(Parameters...), const Argument* arguments,
          AtenTensorHandle* const* places) {
  call(kernel, arguments, places, std::index_sequence_for<Parameters...>{});
}

}  // namespace
}  // namespace mtpc
