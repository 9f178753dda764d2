// A chain of linear layers and norms on packed bfloat16 weights. See mtpc/ops/chain.py.
#include <torch/csrc/stable/ops.h>

#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gated_tiles.h"
#include "operators.h"
#include "linear_result.h"
#include "norm.h"
#include "stages.h"

namespace mtpc {
namespace {

/// With more rows the time between operators is nothing beside theirs.
constexpr int64_t kFewRows = 64;

/// What is fetched of a product's weights while the stage before it ends, a worker.
constexpr int64_t kWarmBytes = 256 << 10;

/// Rows of so many elements, `stride` apart.
struct Rows {
  BFloat16* first;
  int64_t width, stride;

  BFloat16* operator[](int64_t row) const { return first + row * stride; }
};

/// One of a chain: a linear layer ("L", with a bias "B"), a gated one ("G"), or a residual sum and
/// its norm ("N", scaled by 1 + weight: "P").
struct Stage {
  char kind;
  Tensor operand;
  std::optional<Tensor> bias;
  int64_t inputs, width;

  bool is_norm() const { return kind == 'N' || kind == 'P'; }
  bool is_gated() const { return kind == 'G'; }
  int64_t features() const { return is_gated() ? 2 * width : width; }
  int64_t tiles() const { return width / kFeatures; }
  const char* weight() const { return static_cast<const char*>(operand.const_data_ptr()); }
};

/// Reads the letters of a chain, and checks that each operand has the size that it must have.
std::vector<Stage> read_stages(
    const std::string& kinds, const std::vector<Tensor>& operands, int64_t width,
    int64_t residual_width) {
  std::vector<Stage> stages;
  size_t next = 0;
  const auto take = [&] {
    STD_TORCH_CHECK(
        next < operands.size() && operands[next].scalar_type() == ScalarType::BFloat16,
        "mtpc_cpu::linear_chain: expected a bfloat16 operand for each stage of ", kinds,
        ", two for B; found ", operands.size());
    return operands[next++];
  };
  for (const char kind : kinds) {
    Stage stage{kind, take(), std::nullopt, width, width};
    if (kind == 'B') stage.bias = take();
    const int64_t features = stage.operand.size(0) * kFeatures;
    bool fits = true;
    if (stage.is_norm()) {
      fits = width == residual_width && stage.operand.dim() == 1 &&
          stage.operand.size(0) == width && stage.operand.is_contiguous();
    } else {
      stage.width = width = stage.is_gated() ? features / 2 : features;
      fits = is_packed_linear(stage.operand, features, stage.inputs) && width % kFeatures == 0 &&
          (!stage.bias || (stage.bias->dim() == 1 && stage.bias->size(0) == width));
    }
    STD_TORCH_CHECK(
        fits && std::string("LBGNP").find(kind) != std::string::npos,
        "mtpc_cpu::linear_chain: operand ", next - 1, " does not fit stage ", kind, " of ", kinds,
        ", which gets rows of ", stage.inputs);
    stages.push_back(std::move(stage));
  }
  STD_TORCH_CHECK(
      next == operands.size(), "mtpc_cpu::linear_chain: ", kinds, " has ", next,
      " operands, found ", operands.size());
  STD_TORCH_CHECK(
      kinds.find_first_of("NP") != std::string::npos,
      "mtpc_cpu::linear_chain: expected a norm among the stages, found ", kinds);
  return stages;
}

/// A call's rows on their way through the stages.
class Chain {
 public:
  Chain(std::vector<Stage>& stages, int64_t rows, double epsilon)
      : stages_(stages), rows_(rows), epsilon_(static_cast<float>(epsilon)) {
    for (const Stage& stage : stages) {
      const int64_t work = stage.is_norm() ? stage.width * kWork : stage.features() * stage.inputs;
      workers_ = std::max(workers_, worker_count(rows * work));
      widest_ = std::max(widest_, stride(stage.width));
      biases_.emplace_back(stage.bias, stage.width);
    }
  }

  /// From `x` to `out`; `total` becomes the residual sum.
  void run(const Rows& x, const BFloat16* residual, const Rows& total, const Rows& out) {
    const int64_t place = rows_ * widest_;
    BFloat16* scratch = scratch_.reserve(2 * place);
    std::deque<StageTasks> tasks;
    std::vector<Rows> places{x};
    for (size_t s = 0; s < stages_.size(); ++s) {
      const int64_t width = stages_[s].width;
      const bool last = s + 1 == stages_.size();
      // Two places in turns: a stage begins when nobody reads what the last but one has read.
      places.push_back(last ? out : Rows{scratch + s % 2 * place, width, stride(width)});
      tasks.emplace_back(stages_[s].is_norm() ? rows_ : stages_[s].tiles(), workers_);
    }
    run_workers(workers_, [&](int64_t me) {
      GatedWorker worker;
      // Now, for without memory it throws, and nobody would do a task that it had taken.
      worker.gates.reserve(gates_of_run(rows_));
      const BFloat16* sums = residual;
      for (size_t s = 0; s < stages_.size(); ++s) {
        tasks[s].run(me, gated_run(rows_), [&](Tasks run) {
          run_tasks(s, run, places[s], sums, total, places[s + 1], worker);
        });
        if (stages_[s].is_norm()) sums = total.first;
        tasks[s].wait(warm(s + 1, me));
      }
    });
  }

 private:
  static int64_t stride(int64_t width) {
    return spaced(width * sizeof(BFloat16)) / static_cast<int64_t>(sizeof(BFloat16));
  }

  void run_tasks(size_t s, Tasks run, const Rows& from, const BFloat16* sums, const Rows& total,
                 const Rows& to, GatedWorker& worker) const {
    const Stage& stage = stages_[s];
    const int64_t end = run.first + run.count;
    if (stage.is_norm()) {
      const Norm norm{reinterpret_cast<const BFloat16*>(stage.weight()), stage.width, epsilon_,
                      stage.kind == 'P'};
      for (int64_t row = run.first; row < end; ++row) {
        norm.of_sum(sums + row * total.stride, from[row], total[row], to[row]);
      }
      return;
    }
    const InputRows x{reinterpret_cast<const Group*>(from.first), from.width / kPair,
                      from.stride / kPair};
    if (stage.is_gated()) {
      return multiply_gated(x, rows_, stage.weight(), stage.tiles(), run, worker, to.first,
                            to.stride);
    }
    const LinearResult result{biases_[s].get(), to.first, stage.width, to.stride};
    for (int64_t tile = run.first; tile < end; ++tile) {
      for_products<Bf16Pairs>(
          x, rows_, stage.weight() + tile * x.groups * kGroupBytes, worker.registers,
          [&](int64_t row, const float* products) { result.put(tile, row, products); });
    }
  }

  /// Fetches the first weights of a worker's share in the first product from stage s on.
  Warming warm(size_t s, int64_t me) const {
    while (s < stages_.size() && stages_[s].is_norm()) ++s;
    if (s == stages_.size()) return {nullptr, 0};
    const Stage& stage = stages_[s];
    const int64_t tile = stage.inputs / kPair * kGroupBytes;
    const int64_t first = stage.tiles() * me / workers_;
    const int64_t count = stage.tiles() * (me + 1) / workers_ - first;
    return {stage.weight() + first * tile, std::min(kWarmBytes, count * tile)};
  }

  /// Inputs of a group.
  static constexpr int64_t kPair = 2;

  const std::vector<Stage>& stages_;
  int64_t rows_;
  float epsilon_;
  int64_t workers_ = 1, widest_ = 0;
  std::vector<Biases> biases_;
  Buffer<BFloat16> scratch_;
};

/// One operator after the other, for rows that do not go by tiles, or are many.
std::tuple<Tensor, Tensor> run_each(
    const std::vector<Stage>& stages, Tensor x, Tensor total, double epsilon,
    const std::optional<Tensor>& rows) {
  for (const Stage& stage : stages) {
    if (stage.is_norm()) {
      std::tie(total, x) = add_rms_norm(
          total, x, stage.operand, epsilon, stage.kind == 'P', rows);
    } else if (stage.is_gated()) {
      x = packed_gated_linear(x, stage.operand, stage.features(), rows);
    } else {
      x = packed_linear(x, stage.operand, stage.features(), stage.bias, rows);
    }
  }
  return {total, x};
}

void check_rows(const Tensor& x, const Tensor& residual) {
  bool fits = x.scalar_type() == ScalarType::BFloat16 &&
      residual.scalar_type() == ScalarType::BFloat16 && x.dim() >= 1 && residual.dim() == x.dim() &&
      x.size(x.dim() - 1) > 0;
  for (int64_t dim = 0; fits && dim + 1 < x.dim(); ++dim) fits = x.size(dim) == residual.size(dim);
  STD_TORCH_CHECK(
      fits, "mtpc_cpu::linear_chain: expected x [..., K] and residual [..., N] in bfloat16, of the "
      "same leading sizes");
}

bool go_by_tiles(const std::vector<Stage>& stages, int64_t rows) {
  if (rows > kFewRows) return false;
  for (const Stage& stage : stages) {
    if (!goes_by_tiles({nullptr, stage.inputs / 2, stage.inputs / 2}, rows)) return false;
  }
  return true;
}

}  // namespace

MTPC_OPERATOR std::tuple<Tensor, Tensor> linear_chain(
    const Tensor& x, const Tensor& residual, std::string kinds, std::vector<Tensor> operands,
    double epsilon, const std::optional<Tensor>& rows) {
  check_rows(x, residual);
  const int64_t width = x.size(x.dim() - 1), residual_width = residual.size(x.dim() - 1);
  std::vector<Stage> stages = read_stages(kinds, operands, width, residual_width);
  const int64_t used = used_rows(rows, count_rows(x, width));
  if (!go_by_tiles(stages, used)) return run_each(stages, x, residual, epsilon, rows);
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const Tensor sums = residual.is_contiguous() ? residual : torch::stable::contiguous(residual);
  const Tensor total = empty_rows(residual, residual_width);
  const Tensor out = empty_rows(x, stages.back().width);
  Buffer<char> copy;
  Rows first{const_cast<BFloat16*>(static_cast<const BFloat16*>(dense.const_data_ptr())), width,
             width};
  if (!stages.front().is_norm()) {
    const InputRows from = rows_for_products(first.first, used, width, copy);
    first = {reinterpret_cast<BFloat16*>(const_cast<Group*>(from.first)), width, 2 * from.stride};
  }
  Chain(stages, used, epsilon)
      .run(first, static_cast<const BFloat16*>(sums.const_data_ptr()),
           {data(total), residual_width, residual_width},
           {data(out), stages.back().width, stages.back().width});
  return {total, out};
}

}  // namespace mtpc
