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

template <auto kKernel, class Result, class... Parameters>
struct Bound {
  using Arguments = std::tuple<std::decay_t<Parameters>...>;

  template <size_t... kIndex>
  static const Arguments* take_all(const Argument* from, std::index_sequence<kIndex...>) {
    return new Arguments{take<std::decay_t<Parameters>>(from[kIndex])...};
  }

  static void call(const void* arguments, AtenTensorHandle* const* places) {
    const Arguments& all = *static_cast<const Arguments*>(arguments);
    if constexpr (std::is_void_v<Result>) {
      std::apply(kKernel, all);
    } else if constexpr (std::is_same_v<Result, Tensor>) {
      *places[0] = own(std::apply(kKernel, all).get());
    } else {
      const Result results = std::apply(kKernel, all);
      std::apply([&](const auto&... each) { ((**places++ = own(each.get())), ...); }, results);
    }
  }

  static void release(const void* arguments) { delete static_cast<const Arguments*>(arguments); }
};

template <auto kKernel, class Result, class... Parameters>
BoundKernel bind(Result (*)(Parameters...), const Argument* arguments) {
  using Kernel = Bound<kKernel, Result, Parameters...>;
  constexpr auto kIndices = std::index_sequence_for<Parameters...>{};
  return {Kernel::call, Kernel::release, Kernel::take_all(arguments, kIndices)};
}

/// Makes a call of a kernel, which holds its tensors.
template <auto kKernel>
BoundKernel bind(const Argument* arguments) {
  return bind<kKernel>(kKernel, arguments);
}

}  // namespace
}  // namespace mtpc
