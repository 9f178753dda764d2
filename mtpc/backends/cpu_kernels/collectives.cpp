// Collectives within a step, through memory that the ranks share (group_memory.h).
// mtpc/ops/collectives.py says what the operators mean.
//
// Groups are known by name, as torch knows them. Where a group shares no memory, a tape calls the
// reference in place of a kernel (runner.cpp).
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "group_memory.h"
#include "operators.h"
#include "tensors.h"

namespace mtpc {
namespace {

enum Kind : int64_t { kReduce, kGather, kMax, kFirst };

/// The memory of each group of this process.
class Groups {
 public:
  /// Takes the place of what a group of that name had; returns a number for `remove`.
  int64_t add(const std::string& group, std::shared_ptr<GroupMemory> memory) {
    const std::lock_guard guard(lock_);
    found_[group] = {++last_, std::move(memory)};
    return last_;
  }

  /// Removes a group's memory, if it is the one of that number; 0 stands for any.
  void remove(const std::string& group, int64_t number) {
    const std::lock_guard guard(lock_);
    const auto at = found_.find(group);
    if (at != found_.end() && (number == 0 || at->second.number == number)) found_.erase(at);
  }

  /// Null where the group shares none.
  std::shared_ptr<GroupMemory> find(const std::string& group) {
    const std::lock_guard guard(lock_);
    const auto at = found_.find(group);
    return at == found_.end() ? nullptr : at->second.memory;
  }

 private:
  struct Entry {
    int64_t number = 0;
    std::shared_ptr<GroupMemory> memory;
  };

  std::mutex lock_;
  std::unordered_map<std::string, Entry> found_;
  int64_t last_ = 0;
};

Groups& groups() {
  static Groups& all = *new Groups;  // It outlives threads that end late.
  return all;
}

std::shared_ptr<GroupMemory> memory_of(const std::string& group) {
  auto memory = groups().find(group);
  STD_TORCH_CHECK(memory, "mtpc_cpu: the ranks of group ", group, " share no memory");
  return memory;
}

int64_t share_memory(std::string group, std::string path, int64_t slot_bytes, int64_t rank,
                     std::vector<int64_t> processes, double timeout_s) {
  return groups().add(
      group, std::make_shared<GroupMemory>(path, slot_bytes, rank, processes, timeout_s));
}

void unshare_memory(std::string group, int64_t number) { groups().remove(group, number); }

std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < t.dim(); ++dim) sizes.push_back(t.size(dim));
  return sizes;
}

int64_t bytes_of(const Tensor& t) { return t.numel() * t.element_size(); }

char* bytes_to(const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }

/// A dense tensor as a table: rows that end where the dimension `dim` does.
struct Table {
  int64_t rows;
  /// Bytes of one step along the dimension.
  int64_t step;

  Table(const Tensor& t, int64_t dim) : rows(1), step(t.element_size()) {
    STD_TORCH_CHECK(dim >= 0 && dim < t.dim(), "mtpc_cpu: no dimension ", dim);
    for (int64_t i = 0; i < dim; ++i) rows *= t.size(i);
    for (int64_t i = dim + 1; i < t.dim(); ++i) step *= t.size(i);
  }
};

/// Copies bytes [begin, begin + count) of a table with rows of `width` bytes to one whose rows are
/// `pitch` bytes apart.
void place(char* to, int64_t pitch, int64_t width, int64_t begin, int64_t count, const char* from) {
  while (count > 0) {
    const int64_t at = begin % width, copied = std::min(count, width - at);
    std::memcpy(to + begin / width * pitch + at, from, copied);
    from += copied, begin += copied, count -= copied;
  }
}

/// The sum of all ranks' numbers, in the order of the ranks, rounded once.
template <class T>
void add_parts(const GroupMemory::Parts& parts, int64_t count, T* out) {
  using A = Accumulator<T>;
  for (int64_t i = 0; i < count; i += kLanes<A>) {
    const int64_t lanes = std::min<int64_t>(kLanes<A>, count - i);
    const auto numbers = [&](const char* part) {
      const T* from = reinterpret_cast<const T*>(part) + i;
      return lanes == kLanes<A> ? load<A>(from) : load_first<A>(from, lanes);
    };
    Vec<A> sums = numbers(parts[0]);
    for (size_t rank = 1; rank < parts.size(); ++rank) sums += numbers(parts[rank]);
    A held[kLanes<A>];
    store(held, sums);
    round_to(out + i, held, lanes);
  }
}

/// A rank's largest logit of a row, and its id, which a double holds exactly.
struct Best {
  double value, id;

  /// Whether this one wins over another of an earlier place: not a number is the largest.
  bool wins_over(const Best& earlier) const {
    return value > earlier.value || (std::isnan(value) && !std::isnan(earlier.value));
  }
};

/// The first of the largest numbers of a row.
template <class T>
Best best_of(const T* row, int64_t count) {
  using A = Accumulator<T>;
  // A block is searched only where some lane of it is larger than all before, or is no number.
  constexpr int64_t kBlock = 16 * kLanes<A>;
  Best best{static_cast<double>(row[0]), 0};
  for (int64_t begin = 0; begin < count && !std::isnan(best.value); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    bool is_searched = end - begin < kBlock;
    if (!is_searched) {
      Mask<A> found{};
      const Vec<A> most = Vec<A>{} + static_cast<A>(best.value);
      for (int64_t i = begin; i < end; i += kLanes<A>) found |= ~(load<A>(row + i) <= most);
      for (int lane = 0; lane < kLanes<A>; ++lane) is_searched |= found[lane] != 0;
    }
    for (int64_t i = begin; is_searched && i < end; ++i) {
      const Best other{static_cast<double>(row[i]), static_cast<double>(i)};
      if (other.wins_over(best)) best = other;
    }
  }
  return best;
}

}  // namespace

MTPC_OPERATOR Tensor all_reduce(const Tensor& part, const std::string& group) {
  const auto memory = memory_of(group);
  const Tensor own = as_dense(part), out = dense_empty(part, sizes_of(part));
  const int64_t bytes = bytes_of(own), size = own.element_size();
  with_type(own.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    memory->exchange(kReduce, bytes, own.const_data_ptr(), bytes,
                     [&](const GroupMemory::Parts& parts, int64_t begin, int64_t count) {
                       add_parts(parts, count / size, reinterpret_cast<T*>(bytes_to(out) + begin));
                     });
  });
  return out;
}

MTPC_OPERATOR Tensor all_gather(const Tensor& part, int64_t dim, int64_t size, const std::string& group) {
  const auto memory = memory_of(group);
  const Tensor own = as_dense(part);
  const Table table(own, dim);
  const int64_t most = (size + memory->ranks() - 1) / memory->ranks();
  const auto held = [&](int64_t rank) { return std::clamp<int64_t>(size - rank * most, 0, most); };
  STD_TORCH_CHECK(own.size(dim) == held(memory->rank()), "mtpc_cpu::all_gather: rank ",
                  memory->rank(), " has ", own.size(dim), " of ", size, " along ", dim);
  std::vector<int64_t> shape = sizes_of(own);
  shape[dim] = size;
  const Tensor out = dense_empty(part, shape);
  memory->exchange(
      kGather, table.rows * most * table.step, own.const_data_ptr(), bytes_of(own),
      [&](const GroupMemory::Parts& parts, int64_t begin, int64_t count) {
        for (int64_t rank = 0; rank < memory->ranks(); ++rank) {
          const int64_t width = held(rank) * table.step, left = table.rows * width - begin;
          place(bytes_to(out) + rank * most * table.step, size * table.step, width, begin,
                std::min(count, left), parts[rank]);
        }
      });
  return out;
}

MTPC_OPERATOR Tensor rank_part(const Tensor& whole, int64_t dim, int64_t ranks, const std::string& group) {
  const auto memory = memory_of(group);
  const Tensor from = as_dense(whole);
  const Table table(from, dim);
  STD_TORCH_CHECK(ranks == memory->ranks() && from.size(dim) % ranks == 0,
                  "mtpc_cpu::rank_part: expected ", memory->ranks(), " equal parts");
  std::vector<int64_t> shape = sizes_of(from);
  shape[dim] /= ranks;
  const Tensor out = dense_empty(whole, shape);
  const int64_t width = shape[dim] * table.step;
  const char* own = static_cast<const char*>(from.const_data_ptr()) + memory->rank() * width;
  for (int64_t row = 0; row < table.rows; ++row) {
    std::memcpy(bytes_to(out) + row * width, own + row * ranks * width, width);
  }
  return out;
}

MTPC_OPERATOR Tensor vocab_embedding(const Tensor& rows, const Tensor& ids, int64_t step,
                                     const std::string& group) {
  const int64_t first = memory_of(group)->rank() * step;
  STD_TORCH_CHECK(rows.dim() == 2 && ids.scalar_type() == ScalarType::Long,
                  "mtpc_cpu::vocab_embedding: expected rows [V, H] and int64 ids");
  const Tensor table = adjacent_last(rows), wanted = as_dense(ids);
  std::vector<int64_t> shape = sizes_of(ids);
  shape.push_back(rows.size(1));
  const Tensor summand = dense_empty(rows, shape);
  const int64_t size = rows.element_size(), width = rows.size(1) * size;
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  const auto* id = static_cast<const int64_t*>(wanted.const_data_ptr());
  for (int64_t i = 0; i < wanted.numel(); ++i) {
    const int64_t own = id[i] - first;
    char* to = bytes_to(summand) + i * width;
    if (own >= 0 && own < rows.size(0)) {
      std::memcpy(to, from + own * table.stride(0) * size, width);
    } else {
      std::memset(to, 0, width);
    }
  }
  return all_reduce(summand, group);
}

MTPC_OPERATOR std::tuple<Tensor, Tensor> vocab_max(const Tensor& logits, int64_t step,
                                                   const std::string& group) {
  const auto memory = memory_of(group);
  const Tensor from = as_dense(logits);
  const std::vector<int64_t> shape = leading_sizes(from);
  const int64_t count = from.size(from.dim() - 1), rows = count_rows(from, count);
  STD_TORCH_CHECK(count > 0, "mtpc_cpu::vocab_max: expected logits on every rank");
  const Tensor values = dense_empty(from, shape), ids = dense_empty(shape, aoti_torch_dtype_int64());
  std::vector<Best> told(rows);
  with_type(from.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* row = static_cast<const T*>(from.const_data_ptr());
    run_tasks(rows, worker_count(rows * count), [&](int64_t i) {
      told[i] = best_of(row + i * count, count);
      told[i].id += static_cast<double>(memory->rank() * step);
    });
    const int64_t bytes = rows * static_cast<int64_t>(sizeof(Best));
    memory->exchange(kMax, bytes, told.data(), bytes,
                     [&](const GroupMemory::Parts& parts, int64_t begin, int64_t most) {
                       const int64_t first = begin / static_cast<int64_t>(sizeof(Best));
                       for (int64_t i = 0; i < most / static_cast<int64_t>(sizeof(Best)); ++i) {
                         Best best = reinterpret_cast<const Best*>(parts[0])[i];
                         for (const char* part : parts) {
                           const Best& other = reinterpret_cast<const Best*>(part)[i];
                           if (other.wins_over(best)) best = other;
                         }
                         static_cast<T*>(values.mutable_data_ptr())[first + i] =
                             static_cast<T>(best.value);
                         static_cast<int64_t*>(ids.mutable_data_ptr())[first + i] =
                             static_cast<int64_t>(best.id);
                       }
                     });
  });
  return {values, ids};
}

MTPC_OPERATOR Tensor first_rank(const Tensor& value, const std::string& group) {
  const auto memory = memory_of(group);
  const Tensor own = as_dense(value), out = dense_empty(value, sizes_of(value));
  const int64_t bytes = bytes_of(own);
  memory->exchange(kFirst, bytes, own.const_data_ptr(), memory->rank() == 0 ? bytes : 0,
                   [&](const GroupMemory::Parts& parts, int64_t begin, int64_t count) {
                     std::memcpy(bytes_to(out) + begin, parts[0], count);
                   });
  return out;
}

}  // namespace mtpc

extern "C" AOTI_TORCH_EXPORT int64_t mtpc_shares_memory(const char* group) {
  return mtpc::groups().find(group) != nullptr;
}

// How Python gives and takes the memory (mtpc/program/rank_exchanges.py).
STABLE_TORCH_LIBRARY_FRAGMENT(mtpc_cpu, library) {
  library.def(
      "share_memory(str group, str path, int slot_bytes, int rank, int[] processes, "
      "float timeout_s) -> int");
  library.def("unshare_memory(str group, int number=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mtpc_cpu, CompositeExplicitAutograd, library) {
  library.impl("share_memory", TORCH_BOX(&mtpc::share_memory));
  library.impl("unshare_memory", TORCH_BOX(&mtpc::unshare_memory));
}
