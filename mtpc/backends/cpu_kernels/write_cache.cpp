// Writes rows to the slots of a cache. See mtpc/ops/attention.py.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "cache_codes.h"
#include "operators.h"

namespace mtpc {
namespace {

/// Whether the elements from a dimension on are adjacent in memory. They are in a slot of a cache
/// that was allocated on its own, and in a row that is a slice of a joint projection's result.
bool is_dense_from(const Tensor& t, int64_t first) {
  int64_t expected = 1;
  for (int64_t dim = t.dim() - 1; dim >= first; --dim) {
    if (t.size(dim) > 1 && t.stride(dim) != expected) return false;
    expected *= t.size(dim);
  }
  return true;
}

/// Copies one dense row into a slot, dimension by dimension from `dim` on; returns the row's end.
const char* scatter_row(const char* row, char* slot, const Tensor& cache, int64_t dim) {
  const int64_t width = cache.element_size();
  if (dim == cache.dim()) {
    std::memcpy(slot, row, width);
    return row + width;
  }
  for (int64_t i = 0; i < cache.size(dim); ++i) {
    row = scatter_row(row, slot + i * cache.stride(dim) * width, cache, dim + 1);
  }
  return row;
}

void check_write(const Tensor& cache, const Tensor& rows, const Tensor& slot_mapping) {
  STD_TORCH_CHECK(
      cache.dim() >= 2 && rows.dim() == cache.dim() - 1 && slot_mapping.dim() == 1 &&
          slot_mapping.size(0) == rows.size(0),
      "mtpc_cpu::write_cache: expected cache [N, P, ...], rows [T, ...], slot_mapping [T]");
  for (int64_t dim = 1; dim < rows.dim(); ++dim) {
    STD_TORCH_CHECK(
        rows.size(dim) == cache.size(dim + 1), "mtpc_cpu::write_cache: rows have size ",
        rows.size(dim), " where the cache has ", cache.size(dim + 1));
  }
}

/// Writes rows of heads as codes, and their scales.
void write_rows_of_codes(
    const Tensor& cache, const Tensor& rows, const Tensor& slot_mapping, const Tensor& scales) {
  const CodedSlots slots(cache, scales);
  const Indices places(slot_mapping, "slot_mapping", 1);
  const Tensor dense = dense_in(rows, ScalarType::Float);
  const float* row = static_cast<const float*>(dense.const_data_ptr());
  const int64_t heads = rows.size(1), width = rows.size(2);
  run_tasks(rows.size(0), worker_count(rows.numel() * kWork), [&](int64_t i) {
    const int64_t slot = places(i);
    if (slot < 0) return;
    STD_TORCH_CHECK(
        slot < slots.capacity, "mtpc_cpu::write_cache: slot ", slot, " of row ", i,
        " is beyond the ", slots.capacity, " slots of the cache");
    for (int64_t h = 0; h < heads; ++h) slots.write(slot, h, row + (i * heads + h) * width, width);
  });
}

}  // namespace

MTPC_OPERATOR void write_cache(
    const Tensor& cache, const Tensor& rows, const Tensor& slot_mapping,
    const std::optional<Tensor>& scales) {
  check_write(cache, rows, slot_mapping);
  if (scales) return write_rows_of_codes(cache, rows, slot_mapping, *scales);
  const Tensor cast = rows.scalar_type() == cache.scalar_type()
      ? rows
      : torch::stable::to(rows, cache.scalar_type());
  const Tensor dense = is_dense_from(cast, 1) ? cast : torch::stable::contiguous(cast);
  const Indices slots(slot_mapping, "slot_mapping", 1);
  const bool dense_slots = is_dense_from(cache, 2);
  const int64_t page_size = cache.size(1);
  const int64_t capacity = cache.size(0) * page_size;
  const int64_t width = cache.element_size();
  const int64_t row_bytes = dense.size(0) == 0 ? 0 : dense.numel() / dense.size(0) * width;
  const char* row = static_cast<const char*>(dense.const_data_ptr());
  char* data = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t i = 0; i < dense.size(0); ++i, row += dense.stride(0) * width) {
    const int64_t slot = slots(i);
    if (slot < 0) continue;
    STD_TORCH_CHECK(
        slot < capacity, "mtpc_cpu::write_cache: slot ", slot, " of row ", i, " is beyond the ",
        capacity, " slots of the cache");
    const int64_t offset = slot / page_size * cache.stride(0) + slot % page_size * cache.stride(1);
    if (dense_slots) {
      std::memcpy(data + offset * width, row, row_bytes);
    } else {
      scatter_row(row, data + offset * width, cache, 2);
    }
  }
}

}  // namespace mtpc
