// Registers the ops with torch, through the stable ABI only; and the simplest of them.
#include "kernels.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "tensors.h"

namespace mtpc {
namespace {

/// Whether the elements from a dimension on are adjacent in memory: of a slot of any cache that
/// was allocated on its own, of a row that is a slice of a joint projection's.
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

void check_clear(const Tensor& x, int64_t features) {
  STD_TORCH_CHECK(
      x.is_contiguous() && features >= 0 && features <= x.dim(),
      "mtpc_cpu::clear_idle_rows: expected a dense x of at least ", features, " dimensions");
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

}  // namespace

void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& slot_mapping) {
  check_write(cache, rows, slot_mapping);
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

void clear_idle_rows(const Tensor& x, const Tensor& rows, int64_t features) {
  check_clear(x, features);
  int64_t width = x.element_size();
  for (int64_t dim = x.dim() - features; dim < x.dim(); ++dim) width *= x.size(dim);
  const int64_t bytes = x.numel() * x.element_size();
  const int64_t used = used_rows(rows, width == 0 ? 0 : bytes / width) * width;
  std::memset(static_cast<char*>(x.mutable_data_ptr()) + used, 0, bytes - used);
}

}  // namespace mtpc

STABLE_TORCH_LIBRARY(mtpc_cpu, library) {
  library.def("write_cache(Tensor(a!) cache, Tensor rows, Tensor slot_mapping) -> ()");
  library.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor query_start_loc, float scale, int sliding_window=0, "
      "float softcap=0.0, Tensor? sinks=None) -> Tensor");
  library.def(
      "latent_attention(Tensor q, Tensor latent_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start_loc, float scale, int latent_rank) -> Tensor");
  library.def(
      "choose_slots(Tensor query, Tensor weights, Tensor index_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor query_start_loc, int count) -> Tensor");
  library.def(
      "experts(Tensor x, Tensor gate_up, Tensor down, Tensor expert_ids, "
      "Tensor expert_weights, float limit=0.0, bool limit_input=False) -> Tensor");
  library.def(
      "packed_experts(Tensor x, Tensor gate_up, Tensor down, Tensor expert_ids, "
      "Tensor expert_weights, float limit=0.0, bool limit_input=False, Tensor? rows=None) "
      "-> Tensor");
  library.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
  library.def(
      "packed_linear(Tensor x, Tensor weight, int features, Tensor? bias=None, "
      "Tensor? rows=None) -> Tensor");
  library.def(
      "packed_linear_max(Tensor x, Tensor weight, int features, Tensor? bias=None, "
      "Tensor? rows=None) -> (Tensor, Tensor)");
  library.def(
      "packed_gated_linear(Tensor x, Tensor weight, int features, Tensor? rows=None) -> Tensor");
  library.def(
      "linear_chain(Tensor x, Tensor residual, str kinds, Tensor[] operands, float epsilon, "
      "Tensor? rows=None) -> (Tensor, Tensor)");
  library.def(
      "packed_head_linear(Tensor x, Tensor weight, int features, Tensor? rows=None) -> Tensor");
  library.def("float32_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def(
      "quantised_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, "
      "Tensor? rows=None) -> Tensor");
  library.def(
      "quantised_linear_max(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, "
      "Tensor? rows=None) -> (Tensor, Tensor)");
  library.def(
      "quantised_experts(Tensor x, Tensor gate_up, Tensor gate_up_scales, Tensor down, "
      "Tensor down_scales, Tensor expert_ids, Tensor expert_weights, float limit=0.0, "
      "bool limit_input=False, Tensor? rows=None) -> Tensor");
  library.def(
      "gated_delta_rule(Tensor rows, Tensor conv_weight, Tensor a_log, Tensor dt_bias, "
      "Tensor(a!) recurrent, Tensor(b!) history, Tensor(c!) standing, Tensor state_slots, "
      "Tensor seq_lens, Tensor query_start_loc, Tensor certain_lens) -> Tensor");
  library.def(
      "rms_norm(Tensor x, Tensor weight, float epsilon, bool plus_one=False, Tensor? rows=None) "
      "-> Tensor");
  library.def(
      "add_rms_norm(Tensor x, Tensor added, Tensor weight, float epsilon, bool plus_one=False, "
      "Tensor? rows=None) -> (Tensor, Tensor)");
  library.def("silu_and_mul(Tensor gate_up, Tensor? rows=None) -> Tensor");
  library.def("clear_idle_rows(Tensor(a!) x, Tensor rows, int features) -> ()");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin, Tensor? rows=None) -> Tensor");
  library.def(
      "rotate_and_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? rows=None) -> Tensor");
  library.def(
      "accept(Tensor(a!) out_token_ids, Tensor(b!) num_accepted, Tensor(c!) num_emitted, "
      "Tensor(d!) stop_reason, Tensor chosen, Tensor finite, Tensor ids, Tensor query_start_loc, "
      "Tensor context_lens, Tensor active, Tensor remaining_tokens, Tensor stop_ids, "
      "Tensor state_indices, Tensor? is_prompt=None, Tensor? goes_on=None) "
      "-> (Tensor, Tensor, Tensor)");
  library.def("sinkhorn(Tensor logits, int rounds, float epsilon) -> Tensor");
  library.def(
      "sample(Tensor logits, Tensor ids, Tensor positions, Tensor state_slots, Tensor floats, "
      "Tensor ints, Tensor bias_ids, Tensor bias_values, Tensor allowed_tokens, "
      "Tensor prompt_tokens, Tensor output_counts, Tensor stop_ids, Tensor? token_mask=None) "
      "-> Tensor");
  library.def(
      "count_tokens(Tensor(a!) output_counts, Tensor ids, Tensor num_emitted, "
      "Tensor state_slots) -> ()");
  library.def(
      "write_logprobs(Tensor(a!) logprobs, Tensor(b!) top_ids, Tensor(c!) top_logprobs, "
      "Tensor logits, Tensor ids, Tensor num_emitted, Tensor state_slots, Tensor ints) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mtpc_cpu, CPU, library) {
  library.impl("write_cache", TORCH_BOX(&mtpc::write_cache));
  library.impl("paged_attention", TORCH_BOX(&mtpc::paged_attention));
  library.impl("latent_attention", TORCH_BOX(&mtpc::latent_attention));
  library.impl("choose_slots", TORCH_BOX(&mtpc::choose_slots));
  library.impl("experts", TORCH_BOX(&mtpc::experts));
  library.impl("packed_experts", TORCH_BOX(&mtpc::packed_experts));
  library.impl("pack", TORCH_BOX(&mtpc::pack));
  library.impl("packed_linear", TORCH_BOX(&mtpc::packed_linear));
  library.impl("packed_linear_max", TORCH_BOX(&mtpc::packed_linear_max));
  library.impl("packed_gated_linear", TORCH_BOX(&mtpc::packed_gated_linear));
  library.impl("linear_chain", TORCH_BOX(&mtpc::linear_chain));
  library.impl("packed_head_linear", TORCH_BOX(&mtpc::packed_head_linear));
  library.impl("float32_linear", TORCH_BOX(&mtpc::float32_linear));
  library.impl("quantised_linear", TORCH_BOX(&mtpc::quantised_linear));
  library.impl("quantised_linear_max", TORCH_BOX(&mtpc::quantised_linear_max));
  library.impl("quantised_experts", TORCH_BOX(&mtpc::quantised_experts));
  library.impl("gated_delta_rule", TORCH_BOX(&mtpc::gated_delta_rule));
  library.impl("rms_norm", TORCH_BOX(&mtpc::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&mtpc::add_rms_norm));
  library.impl("silu_and_mul", TORCH_BOX(&mtpc::silu_and_mul));
  library.impl("clear_idle_rows", TORCH_BOX(&mtpc::clear_idle_rows));
  library.impl("rotate", TORCH_BOX(&mtpc::rotate));
  library.impl("rotate_and_write", TORCH_BOX(&mtpc::rotate_and_write));
  library.impl("accept", TORCH_BOX(&mtpc::accept));
  library.impl("sinkhorn", TORCH_BOX(&mtpc::sinkhorn));
  library.impl("sample", TORCH_BOX(&mtpc::sample));
  library.impl("count_tokens", TORCH_BOX(&mtpc::count_tokens));
  library.impl("write_logprobs", TORCH_BOX(&mtpc::write_logprobs));
}
