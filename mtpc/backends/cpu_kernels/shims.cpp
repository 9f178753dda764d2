// The ops as functions of C, which AOTInductor's packages call without torch's dispatcher.
//
// A call through the dispatcher is looked up, boxed and unboxed, at several microseconds; a step of
// 28 layers has hundreds. How arguments are passed is AOTInductor's convention for its own shims:
// handles are borrowed, results are new handles, an optional tensor is a pointer to its handle.
// Declarations for the generated code are made of the ops' schemas (direct_calls.py).
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>
#include <type_traits>

#include "kernels.h"

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

/// What an op throws goes through the generated code to whoever runs the package.
template <class Op, class... Arguments>
AOTITorchError call(AtenTensorHandle* out, Op op, Arguments... arguments) {
  if constexpr (std::is_void_v<decltype(op(borrow(arguments)...))>) {
    op(borrow(arguments)...);
    if (out) *out = nullptr;
  } else {
    *out = own(op(borrow(arguments)...).get());
  }
  return AOTI_TORCH_SUCCESS;
}

/// The same of an op with several results, each with a place of its own.
template <size_t kResults, class Op, class... Arguments>
AOTITorchError call_for(
    AtenTensorHandle* const (&places)[kResults], Op op, Arguments... arguments) {
  const auto results = op(borrow(arguments)...);
  static_assert(std::tuple_size_v<std::decay_t<decltype(results)>> == kResults);
  AtenTensorHandle* const* place = places;
  std::apply([&](const auto&... each) { ((**place++ = own(each.get())), ...); }, results);
  return AOTI_TORCH_SUCCESS;
}

}  // namespace
}  // namespace mtpc

using H = AtenTensorHandle;
using O = AtenTensorHandle*;  // of an optional tensor, null if there is none

#define MTPC_SHIM AOTI_TORCH_EXPORT AOTITorchError

extern "C" {

MTPC_SHIM aoti_torch_cpu_write_cache(H cache, H rows, H slot_mapping, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::write_cache, cache, rows, slot_mapping);
}

MTPC_SHIM aoti_torch_cpu_paged_attention(
    H q, H k_cache, H v_cache, H block_table, H seq_lens, H query_start_loc, double scale,
    int64_t sliding_window, double softcap, O sinks, AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::paged_attention, q, k_cache, v_cache, block_table, seq_lens, query_start_loc,
      scale, sliding_window, softcap, sinks);
}

MTPC_SHIM aoti_torch_cpu_latent_attention(
    H q, H latent_cache, H block_table, H seq_lens, H query_start_loc, double scale,
    int64_t latent_rank, AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::latent_attention, q, latent_cache, block_table, seq_lens, query_start_loc, scale,
      latent_rank);
}

MTPC_SHIM aoti_torch_cpu_choose_slots(
    H query, H weights, H index_cache, H block_table, H seq_lens, H query_start_loc, int64_t count,
    AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::choose_slots, query, weights, index_cache, block_table, seq_lens, query_start_loc,
      count);
}

MTPC_SHIM aoti_torch_cpu_packed_experts(
    H x, H gate_up, H down, H expert_ids, H expert_weights, double limit, int32_t limit_input,
    O rows, AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::packed_experts, x, gate_up, down, expert_ids, expert_weights, limit, limit_input,
      rows);
}

MTPC_SHIM aoti_torch_cpu_packed_linear(
    H x, H weight, int64_t features, O bias, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::packed_linear, x, weight, features, bias, rows);
}

MTPC_SHIM aoti_torch_cpu_packed_linear_max(
    H x, H weight, int64_t features, O bias, O rows, AtenTensorHandle* values,
    AtenTensorHandle* indices) {
  return mtpc::call_for(
      {values, indices}, mtpc::packed_linear_max, x, weight, features, bias, rows);
}

MTPC_SHIM aoti_torch_cpu_packed_gated_linear(
    H x, H weight, int64_t features, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::packed_gated_linear, x, weight, features, rows);
}

MTPC_SHIM aoti_torch_cpu_linear_chain(
    H x, H residual, const char* kinds, const AtenTensorHandle* operands, int64_t num_operands,
    double epsilon, O rows, AtenTensorHandle* total, AtenTensorHandle* out) {
  return mtpc::call_for(
      {total, out}, mtpc::linear_chain, x, residual, kinds, mtpc::Handles{operands, num_operands},
      epsilon, rows);
}

MTPC_SHIM aoti_torch_cpu_packed_head_linear(
    H x, H weight, int64_t features, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::packed_head_linear, x, weight, features, rows);
}

MTPC_SHIM aoti_torch_cpu_float32_linear(H x, H weight, O bias, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::float32_linear, x, weight, bias);
}

MTPC_SHIM aoti_torch_cpu_quantised_linear(
    H x, H weight, H scales, O bias, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::quantised_linear, x, weight, scales, bias, rows);
}

MTPC_SHIM aoti_torch_cpu_quantised_linear_max(
    H x, H weight, H scales, O bias, O rows, AtenTensorHandle* values, AtenTensorHandle* indices) {
  return mtpc::call_for(
      {values, indices}, mtpc::quantised_linear_max, x, weight, scales, bias, rows);
}

MTPC_SHIM aoti_torch_cpu_quantised_experts(
    H x, H gate_up, H gate_up_scales, H down, H down_scales, H expert_ids, H expert_weights,
    double limit, int32_t limit_input, O rows, AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::quantised_experts, x, gate_up, gate_up_scales, down, down_scales, expert_ids,
      expert_weights, limit, limit_input, rows);
}

MTPC_SHIM aoti_torch_cpu_gated_delta_rule(
    H rows, H conv_weight, H a_log, H dt_bias, H recurrent, H history, H standing, H state_slots,
    H seq_lens, H query_start_loc, H certain_lens, AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::gated_delta_rule, rows, conv_weight, a_log, dt_bias, recurrent, history, standing,
      state_slots, seq_lens, query_start_loc, certain_lens);
}

MTPC_SHIM aoti_torch_cpu_rms_norm(
    H x, H weight, double epsilon, int32_t plus_one, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::rms_norm, x, weight, epsilon, plus_one, rows);
}

MTPC_SHIM aoti_torch_cpu_add_rms_norm(
    H x, H added, H weight, double epsilon, int32_t plus_one, O rows, AtenTensorHandle* total,
    AtenTensorHandle* normed) {
  return mtpc::call_for(
      {total, normed}, mtpc::add_rms_norm, x, added, weight, epsilon, plus_one, rows);
}

MTPC_SHIM aoti_torch_cpu_silu_and_mul(H gate_up, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::silu_and_mul, gate_up, rows);
}

MTPC_SHIM aoti_torch_cpu_clear_idle_rows(H x, H rows, int64_t features, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::clear_idle_rows, x, rows, features);
}

MTPC_SHIM aoti_torch_cpu_rotate(H x, H cos, H sin, O rows, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::rotate, x, cos, sin, rows);
}

MTPC_SHIM aoti_torch_cpu_rotate_and_write(
    H q, H k, H v, H cos, H sin, H k_cache, H v_cache, H slot_mapping, O rows,
    AtenTensorHandle* out) {
  return mtpc::call(
      out, mtpc::rotate_and_write, q, k, v, cos, sin, k_cache, v_cache, slot_mapping, rows);
}

MTPC_SHIM aoti_torch_cpu_accept(
    H out_token_ids, H num_accepted, H num_emitted, H stop_reason, H chosen, H finite, H ids,
    H query_start_loc, H context_lens, H active, H remaining_tokens, H stop_ids, H state_indices,
    O is_prompt, O goes_on, AtenTensorHandle* anchors, AtenTensorHandle* remaining,
    AtenTensorHandle* lens) {
  return mtpc::call_for(
      {anchors, remaining, lens}, mtpc::accept, out_token_ids, num_accepted, num_emitted,
      stop_reason, chosen, finite, ids, query_start_loc, context_lens, active, remaining_tokens,
      stop_ids, state_indices, is_prompt, goes_on);
}

MTPC_SHIM aoti_torch_cpu_sinkhorn(H logits, int64_t rounds, double epsilon, AtenTensorHandle* out) {
  return mtpc::call(out, mtpc::sinkhorn, logits, rounds, epsilon);
}

}  // extern "C"
