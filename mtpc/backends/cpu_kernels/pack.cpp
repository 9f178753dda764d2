// Packing: weights in the order in which linear.cpp and packed_experts.cpp read them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "operators.h"
#include "packed.h"
#include "tensors.h"

namespace mtpc {
namespace {

/// Groups of one feature in a cache line.
constexpr int64_t kLine = 16;

/// A stack of matrices, `features` rows of `groups` groups, and their tiles.
struct Packing {
  const char* from;
  Group* to;
  int64_t features, groups;

  int64_t row_bytes() const { return groups * sizeof(Group); }
};

/// Copies whole cache lines past the caches, because nothing reads them soon.
inline void copy_past_caches(void* to, const void* from, size_t bytes) {
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m512i) == 0) {
    for (size_t i = 0; i < bytes / sizeof(__m512i); ++i) {
      _mm512_stream_si512(static_cast<__m512i*>(to) + i, static_cast<const __m512i*>(from)[i]);
    }
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

/// Maps pages of a file at once that would otherwise be mapped by one fault for every few.
/// Only ever a matter of speed: where the system does not know how, nothing happens.
void expect_reads([[maybe_unused]] const char* from, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_POPULATE_READ)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(from);
  const uintptr_t begin = address / page * page;
  madvise(reinterpret_cast<void*>(begin), address + bytes - begin, MADV_POPULATE_READ);
#endif
}

/// A tile's block of one line of each feature.
using Block = Group[kLine][kFeatures];

/// Largest magnitudes in the places of a line, as the bits of a bfloat16 without its sign.
class Largest {
 public:
  /// Looks at the first `width` groups of a line. A pack reads every value, so this is nearly free.
  void take(const Group (&line)[kLine], int64_t width) {
    int16_t values[2 * kLine];
    std::memcpy(values, line, sizeof(values));
    for (int64_t i = 0; i < 2 * width; ++i) {
      most_[i] = std::max<int16_t>(most_[i], values[i] & 0x7fff);
    }
  }

  /// Whether none of the values was NaN or infinity.
  bool is_finite() const { return *std::max_element(most_, most_ + 2 * kLine) < 0x7f80; }

 private:
  int16_t most_[2 * kLine] = {};
};

/// `count` lines of `width` groups, `stride` bytes apart, become columns.
inline void transpose(const char* lines, int64_t stride, int64_t count, int64_t width, Block& to,
                      Largest& largest) {
  for (int64_t f = 0; f < count; ++f) {
    Group line[kLine] = {};
    std::memcpy(line, lines + f * stride, width * sizeof(Group));
    // More streams than the processor follows by itself.
    __builtin_prefetch(lines + f * stride + sizeof(line));
    largest.take(line, width);
    for (int64_t i = 0; i < width; ++i) to[i][f] = line[i];
  }
}

/// One tile: `count` features' rows become columns; columns beyond them are zeros.
void pack_tile(const char* rows, int64_t count, const Packing& p, Group* to, Largest& largest) {
  alignas(64) Block block = {};
  int64_t k = 0;
  if (count == kFeatures) {  // Sizes that the compiler knows: most of the work.
    for (; k + kLine <= p.groups; k += kLine, to += kLine * kFeatures) {
      transpose(rows + k * sizeof(Group), p.row_bytes(), kFeatures, kLine, block, largest);
      copy_past_caches(to, block, sizeof(block));
    }
  }
  for (; k < p.groups; k += kLine, to += kLine * kFeatures) {
    const int64_t width = std::min(kLine, p.groups - k);
    transpose(rows + k * sizeof(Group), p.row_bytes(), count, width, block, largest);
    std::memcpy(to, block, width * sizeof(block[0]));
  }
}

/// Tiles [begin, end), counted over the whole stack. Whether they are finite, if they are bfloat16.
bool pack_tiles(const Packing& p, int64_t begin, int64_t end) {
  const int64_t tiles = count_tiles(p.features);
  const auto first_row = [&](int64_t t) { return t / tiles * p.features + t % tiles * kFeatures; };
  const auto row = [&](int64_t index) { return p.from + index * p.row_bytes(); };
  expect_reads(row(first_row(begin)), row(first_row(end)) - row(first_row(begin)));
  Largest largest;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t count = std::min<int64_t>(kFeatures, first_row(t + 1) - first_row(t));
    pack_tile(row(first_row(t)), count, p, p.to + t * kFeatures * p.groups, largest);
  }
#if defined(__AVX512F__)
  _mm_sfence();  // Stores past the caches are in no order with the end of the task.
#endif
  return largest.is_finite();
}

void check(const Tensor& weight, const Tensor& packed, const std::optional<Tensor>& finite) {
  const int64_t dim = weight.dim(), group = sizeof(Group) / weight.element_size();
  STD_TORCH_CHECK(
      dim >= 2 && weight.is_contiguous() &&
          (weight.scalar_type() == ScalarType::BFloat16 ||
           weight.scalar_type() == ScalarType::Byte) &&
          weight.size(dim - 1) % group == 0,
      "mtpc_cpu::pack: expected a contiguous weight [..., N, K], bfloat16 with an even K, or uint8 "
      "with K a multiple of 4");
  STD_TORCH_CHECK(
      packed.dim() == dim + 2 && packed.scalar_type() == weight.scalar_type() &&
          packed.is_contiguous() && packed.size(dim - 2) == count_tiles(weight.size(dim - 2)) &&
          group * packed.size(dim - 1) == weight.size(dim - 1) && packed.size(dim) == kFeatures &&
          packed.size(dim + 1) == group,
      "mtpc_cpu::pack: expected packed [..., ceil(N / 32), K / ", group, ", 32, ", group, "]");
  for (int64_t i = 0; i < dim - 2; ++i) {
    STD_TORCH_CHECK(
        packed.size(i) == weight.size(i), "mtpc_cpu::pack: stacks of different sizes");
  }
  STD_TORCH_CHECK(
      !finite || (finite->numel() == 1 && finite->scalar_type() == ScalarType::Bool),
      "mtpc_cpu::pack: expected one bool that says whether weights are finite");
}

}  // namespace

MTPC_OPERATOR void pack(const Tensor& weight, const Tensor& packed,
                        const std::optional<Tensor>& finite) {
  check(weight, packed, finite);
  const int64_t dim = weight.dim();
  const Packing packing{static_cast<const char*>(weight.const_data_ptr()),
                        static_cast<Group*>(packed.mutable_data_ptr()), weight.size(dim - 2),
                        packed.size(dim - 1)};
  if (packing.groups == 0 || packing.features == 0) return;
  const int64_t tiles =
      weight.numel() / packing.features / weight.size(dim - 1) * count_tiles(packing.features);
  const int64_t workers = worker_count(weight.numel());
  std::atomic<bool> is_finite{true};
  run_tasks(workers, workers, [&](int64_t part) {
    if (!pack_tiles(packing, tiles * part / workers, tiles * (part + 1) / workers)) {
      is_finite = false;
    }
  });
  if (finite && !is_finite && weight.scalar_type() == ScalarType::BFloat16) {
    *static_cast<bool*>(finite->mutable_data_ptr()) = false;
  }
}

}  // namespace mtpc
