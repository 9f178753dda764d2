// A chain of linear layers and norms on packed weights, of bfloat16 or grouped codes. See
// mtpc/backends/cpu/ops/chain.py.
#include <torch/csrc/stable/ops.h>

#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gated_tiles.h"
#include "grouped_products.h"
#include "operators.h"
#include "linear_result.h"
#include "norm.h"
#include "stages.h"

namespace mtpc {
namespace {

/// With more rows than these, the time between operators hardly counts beside their own.
constexpr int64_t kFewRows = 64;

/// Bytes of a product's weights that each worker fetches while the stage before it ends.
constexpr int64_t kWarmBytes = 256 << 10;

/// Rows of so many elements, `stride` apart.
struct Rows {
  BFloat16* first;
  int64_t width, stride;

  BFloat16* operator[](int64_t row) const { return first + row * stride; }
};

/// One of a chain: a linear layer ("L", with a bias "B"), a gated one ("G"), or a residual sum and
/// its norm ("N", scaled by 1 + weight: "P"). Linear layers on grouped codes have `grouped`. Tensors
/// are the call's operands, null where the stage has none.
struct Stage {
  char kind;
  const Tensor *operand, *bias, *scales, *zeros;
  int64_t inputs, width;
  std::optional<GroupedWeight> grouped;

  bool is_norm() const { return kind == 'N' || kind == 'P'; }
  bool is_gated() const { return kind == 'G'; }
  int64_t features() const { return is_gated() ? 2 * width : width; }
  int64_t tiles() const { return width / kFeatures; }
  const char* weight() const { return static_cast<const char*>(operand->const_data_ptr()); }

  /// Bytes of a tile of a linear layer's weight.
  int64_t tile_bytes() const {
    return grouped ? grouped->tile_bytes() : inputs / kPair * kGroupBytes;
  }

  /// Inputs of a group of bfloat16.
  static constexpr int64_t kPair = 2;
};

std::optional<Tensor> as_optional(const Tensor* tensor) {
  return tensor ? std::optional(*tensor) : std::nullopt;
}

/// Notes a linear stage's width, and whether its operands have the sizes that they must have.
bool fits_linear(Stage& stage) {
  const int64_t features = stage.operand->dim() > 0 ? stage.operand->size(0) * kFeatures : 0;
  stage.width = stage.is_gated() ? features / 2 : features;
  if (stage.scales) {
    stage.grouped = grouped_weight("linear_chain", *stage.operand, *stage.scales,
                                   as_optional(stage.zeros), 0, features, stage.inputs);
  }
  return (stage.grouped || is_packed_linear(*stage.operand, features, stage.inputs)) &&
      stage.width % kFeatures == 0 &&
      (!stage.bias || (stage.bias->dim() == 1 && stage.bias->size(0) == stage.width));
}

/// Reads the letters of a chain, and checks that each operand has the size that it must have.
void read_stages(const std::string& kinds, const std::vector<Tensor>& operands, int64_t width,
                 int64_t residual_width, std::vector<Stage>& stages) {
  stages.clear();
  size_t next = 0;
  const auto take = [&](bool any_dtype = false) {
    STD_TORCH_CHECK(
        next < operands.size() &&
            (any_dtype || operands[next].scalar_type() == ScalarType::BFloat16),
        "mtpc_cpu::linear_chain: expected a bfloat16 operand for each stage of ", kinds,
        ", two for B; found ", operands.size(), " (codes and scales for l, b, g; zeros for z)");
    return &operands[next++];
  };
  for (size_t at = 0; at < kinds.size(); ++at) {
    const bool is_grouped = std::string("lbg").find(kinds[at]) != std::string::npos;
    const char kind = is_grouped ? kinds[at] - 'a' + 'A' : kinds[at];
    const size_t first = next;
    Stage stage{kind, take(is_grouped), nullptr, nullptr, nullptr, width, width, std::nullopt};
    if (is_grouped) stage.scales = take(true);
    if (is_grouped && at + 1 < kinds.size() && kinds[at + 1] == 'z') {
      stage.zeros = take(true);
      ++at;
    }
    if (kind == 'B') stage.bias = take();
    const bool fits = stage.is_norm() ? width == residual_width && stage.operand->dim() == 1 &&
            stage.operand->size(0) == width && stage.operand->is_contiguous()
                                      : fits_linear(stage);
    STD_TORCH_CHECK(
        fits && std::string("LBGNP").find(kind) != std::string::npos,
        "mtpc_cpu::linear_chain: operand ", first, " does not fit stage ", kind, " of ", kinds,
        ", which gets rows of ", stage.inputs);
    width = stage.width;
    stages.push_back(std::move(stage));
  }
  STD_TORCH_CHECK(
      next == operands.size(), "mtpc_cpu::linear_chain: ", kinds, " has ", next,
      " operands, found ", operands.size());
  STD_TORCH_CHECK(
      kinds.find_first_of("NP") != std::string::npos,
      "mtpc_cpu::linear_chain: expected a norm among the stages, found ", kinds);
}

/// What a thread's calls need, kept between them: weights evict all else from the caches, so that
/// allocating it anew would wait for memory.
struct Memory {
  std::vector<Stage> stages;
  std::vector<Rows> places;
  std::deque<StageTasks> tasks;      // two of each stage: its rounding's, and its own
  std::vector<GroupedRows> rounded;  // rows of stages with grouped weights
  Buffer<BFloat16> scratch;

  static Memory& of_this_thread() {
    static thread_local const std::unique_ptr<Memory> memory = std::make_unique<Memory>();
    return *memory;
  }
};

/// A call's rows on their way through the stages.
class Chain {
 public:
  Chain(Memory& memory, int64_t rows, double epsilon)
      : memory_(memory),
        stages_(memory.stages),
        rows_(rows),
        epsilon_(static_cast<float>(epsilon)) {
    biases_.reserve(stages_.size());
    memory.rounded.resize(std::max(memory.rounded.size(), stages_.size()));
    memory.tasks.resize(std::max(memory.tasks.size(), 2 * stages_.size()));
    for (size_t s = 0; s < stages_.size(); ++s) {
      const Stage& stage = stages_[s];
      const int64_t work = stage.is_norm() ? stage.width * kWork : stage.features() * stage.inputs;
      workers_ = std::max(workers_, worker_count(rows * work));
      widest_ = std::max(widest_, stride(stage.width));
      biases_.emplace_back(as_optional(stage.bias), stage.width);
      if (stage.grouped) memory.rounded[s].reserve(rows, stage.grouped->form);
    }
  }

  /// From `x` to `out`; `total` becomes the residual sum.
  void run(const Rows& x, const BFloat16* residual, const Rows& total, const Rows& out) {
    const int64_t place = rows_ * widest_;
    BFloat16* scratch = memory_.scratch.reserve(2 * place);
    std::vector<Rows>& places = memory_.places;
    places = {x};
    for (size_t s = 0; s < stages_.size(); ++s) {
      const int64_t width = stages_[s].width;
      const bool last = s + 1 == stages_.size();
      // Two places alternate: when a stage begins, no worker reads the one before the last any more.
      places.push_back(last ? out : Rows{scratch + s % 2 * place, width, stride(width)});
      rounding(s).begin(needs_rounding(s) ? rows_ : 0, workers_);
      tasks(s).begin(stages_[s].is_norm() ? rows_ : stages_[s].tiles(), workers_);
    }
    run_workers(workers_, [&](int64_t me) {
      GatedWorker worker;
      // This may throw if memory runs out, so it comes before the worker takes any task: no other
      // worker would do that task.
      worker.gates.reserve(gates_of_run(rows_));
      const BFloat16* sums = residual;
      for (size_t s = 0; s < stages_.size(); ++s) {
        if (needs_rounding(s)) {
          rounding(s).run(me, 1, [&](Tasks run) { round(s, run, places[s]); });
          rounding(s).wait(warm(s, me));
        }
        tasks(s).run(me, gated_run(rows_), [&](Tasks run) {
          run_tasks(s, run, places[s], sums, total, places[s + 1], worker);
        });
        if (stages_[s].is_norm()) sums = total.first;
        tasks(s).wait(warm(s + 1, me));
      }
    });
  }

 private:
  static int64_t stride(int64_t width) {
    return spaced(width * sizeof(BFloat16)) / static_cast<int64_t>(sizeof(BFloat16));
  }

  StageTasks& rounding(size_t s) const { return memory_.tasks[2 * s]; }
  StageTasks& tasks(size_t s) const { return memory_.tasks[2 * s + 1]; }

  /// Whether a stage's rows are to be rounded before it. A norm before it does so itself, and so does
  /// a gated layer, if it can.
  bool needs_rounding(size_t s) const {
    return stages_[s].grouped && (s == 0 || !(stages_[s - 1].is_norm() || rounds_tiles(s - 1)));
  }

  /// Whether a gated layer rounds its tiles' features for the stage after it.
  bool rounds_tiles(size_t s) const {
    return stages_[s].is_gated() && s + 1 < stages_.size() && stages_[s + 1].grouped &&
        memory_.rounded[s + 1].takes(kFeatures);
  }

  void round(size_t s, Tasks run, const Rows& from) const {
    for (int64_t row = run.first; row < run.first + run.count; ++row) {
      memory_.rounded[s].set(row, from[row]);
    }
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
      if (s + 1 < stages_.size() && stages_[s + 1].grouped) round(s + 1, run, to);
      return;
    }
    if (stage.grouped) {
      return multiply(s, run, to, worker, [&](int64_t tile, const auto& body) {
        for_grouped_products(
            memory_.rounded[s], 0, rows_, stage.grouped->from(tile), worker.registers, body);
      });
    }
    const InputRows x{reinterpret_cast<const Group*>(from.first), from.width / Stage::kPair,
                      from.stride / Stage::kPair};
    multiply(s, run, to, worker, [&](int64_t tile, const auto& body) {
      for_products(
          x, rows_, stage.weight() + tile * stage.tile_bytes(), worker.registers, body);
    });
  }

  /// Tiles of a linear stage: products(tile, body) calls body(row, its 32 sums) for all rows.
  template <class Products>
  void multiply(size_t s, Tasks run, const Rows& to, GatedWorker& worker,
                const Products& products) const {
    const Stage& stage = stages_[s];
    if (stage.is_gated()) {
      const auto put_in = [&](const auto& put) {
        multiply_gated(products, rows_, stage.tiles(), run, worker.gates, put);
      };
      if (!rounds_tiles(s)) return put_in(GatedResult{to.first, to.stride});
      return put_in([&](int64_t tile, int64_t row, const BFloat16 (&features)[kFeatures]) {
        memory_.rounded[s + 1].set_some(row, tile * kFeatures, kFeatures, features);
      });
    }
    const LinearResult result{biases_[s].get(), to.first, stage.width, to.stride};
    for (int64_t tile = run.first; tile < run.first + run.count; ++tile) {
      products(tile, [&](int64_t row, const float* sums) { result.put(tile, row, sums); });
    }
  }

  /// Fetches the first weights of a worker's share in the first product from stage s on.
  Warming warm(size_t s, int64_t me) const {
    while (s < stages_.size() && stages_[s].is_norm()) ++s;
    if (s == stages_.size()) return {nullptr, 0};
    const Stage& stage = stages_[s];
    const int64_t tile = stage.tile_bytes();
    const int64_t first = stage.tiles() * me / workers_;
    const int64_t count = stage.tiles() * (me + 1) / workers_ - first;
    return {stage.weight() + first * tile, std::min(kWarmBytes, count * tile)};
  }

  Memory& memory_;
  const std::vector<Stage>& stages_;
  int64_t rows_;
  float epsilon_;
  int64_t workers_ = 1, widest_ = 0;
  std::vector<Biases> biases_;
};

/// One operator after the other, for rows that do not go by tiles, or are many.
std::tuple<Tensor, Tensor> run_each(
    const std::vector<Stage>& stages, Tensor x, Tensor total, double epsilon,
    const std::optional<Tensor>& rows) {
  for (const Stage& stage : stages) {
    if (stage.is_norm()) {
      std::tie(total, x) = add_rms_norm(
          total, x, *stage.operand, epsilon, stage.kind == 'P', rows);
    } else if (stage.grouped && stage.is_gated()) {
      x = grouped_gated_linear(
          x, *stage.operand, *stage.scales, as_optional(stage.zeros), stage.features(), rows);
    } else if (stage.grouped) {
      x = grouped_linear(x, *stage.operand, *stage.scales, as_optional(stage.zeros),
                         stage.features(), as_optional(stage.bias), rows);
    } else if (stage.is_gated()) {
      x = packed_gated_linear(x, *stage.operand, stage.features(), rows);
    } else {
      x = packed_linear(x, *stage.operand, stage.features(), as_optional(stage.bias), rows);
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
    if (stage.grouped) continue;
    if (!goes_by_tiles({nullptr, stage.inputs / 2, stage.inputs / 2}, rows)) return false;
  }
  return true;
}

}  // namespace

MTPC_OPERATOR std::tuple<Tensor, Tensor> linear_chain(
    const Tensor& x, const Tensor& residual, const std::string& kinds,
    const std::vector<Tensor>& operands, double epsilon, const std::optional<Tensor>& rows) {
  check_rows(x, residual);
  const int64_t width = x.size(x.dim() - 1), residual_width = residual.size(x.dim() - 1);
  Memory& memory = Memory::of_this_thread();
  std::vector<Stage>& stages = memory.stages;
  read_stages(kinds, operands, width, residual_width, stages);
  const int64_t used = used_rows(rows, count_rows(x, width));
  if (!go_by_tiles(stages, used)) return run_each(stages, x, residual, epsilon, rows);
  const Tensor dense = as_dense(x);
  const Tensor sums = as_dense(residual);
  const Tensor total = empty_rows(residual, residual_width);
  const Tensor out = empty_rows(x, stages.back().width);
  Buffer<char> copy;
  Rows first{const_cast<BFloat16*>(static_cast<const BFloat16*>(dense.const_data_ptr())), width,
             width};
  if (!stages.front().is_norm()) {
    const InputRows from = rows_for_products(first.first, used, width, copy);
    first = {reinterpret_cast<BFloat16*>(const_cast<Group*>(from.first)), width, 2 * from.stride};
  }
  Chain(memory, used, epsilon)
      .run(first, static_cast<const BFloat16*>(sums.const_data_ptr()),
           {data(total), residual_width, residual_width},
           {data(out), stages.back().width, stages.back().width});
  return {total, out};
}

}  // namespace mtpc
