// Runs AOTInductor's packages as an object of torch's, whose methods run without Python's lock.
//
// torch's own binding of the same runner holds the lock from begin to end of a run: no other thread
// of the process, an event loop among them, would get a turn during a step. The runner is not part of
// libtorch's stable ABI, so this is a library of its own, for the one torch that it was built with.
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace mtpc {
namespace {

class Runner : public torch::CustomClassHolder {
 public:
  explicit Runner(std::string library) : runner_(library, 1) {}

  /// The package's names of its constants, by the names that the graph had for them.
  c10::Dict<std::string, std::string> constants() const {
    c10::Dict<std::string, std::string> names;
    for (const auto& [internal, original] : runner_.getConstantNamesToOriginalFQNs()) {
      names.insert(original, internal);
    }
    return names;
  }

  /// Tensors that `run` uses in place: constants by the package's names, inputs in order.
  void bind(const c10::Dict<std::string, at::Tensor>& constants, std::vector<at::Tensor> inputs) {
    constants_.clear();
    for (const auto& item : constants) constants_.emplace(item.key(), item.value());
    inputs_ = std::move(inputs);
    runner_.update_constant_buffer(constants_, false, true, /*user_managed=*/true);
  }

  void run() { runner_.run(inputs_); }

 private:
  // The package refers to these and does not own them: they outlive it.
  std::unordered_map<std::string, at::Tensor> constants_;
  std::vector<at::Tensor> inputs_;
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
};

}  // namespace
}  // namespace mtpc

TORCH_LIBRARY(mtpc_runner, m) {
  m.class_<mtpc::Runner>("Runner")
      .def(torch::init<std::string>())
      .def("constants", &mtpc::Runner::constants)
      .def("bind", &mtpc::Runner::bind)
      .def("run", &mtpc::Runner::run);
}
