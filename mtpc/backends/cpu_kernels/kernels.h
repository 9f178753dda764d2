// The ops; their meaning is that of mtpc::* (mtpc/ops), which see for shapes and dtypes; that of
// `pack` stands in mtpc/weights/packing.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace mtpc {

using torch::stable::Tensor;

void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& slot_mapping);

Tensor paged_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t sliding_window,
    double softcap, const std::optional<Tensor>& sinks);

Tensor latent_attention(
    const Tensor& q, const Tensor& latent_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t latent_rank);

Tensor choose_slots(
    const Tensor& query, const Tensor& weights, const Tensor& index_cache,
    const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
    int64_t count);

Tensor experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights, double limit, bool limit_input);

Tensor packed_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& expert_ids,
    const Tensor& expert_weights, double limit, bool limit_input,
    const std::optional<Tensor>& rows);

void pack(const Tensor& weight, const Tensor& packed);

Tensor packed_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rows);

Tensor packed_gated_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& rows);

std::tuple<Tensor, Tensor> packed_linear_max(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rows);

std::tuple<Tensor, Tensor> linear_chain(
    const Tensor& x, const Tensor& residual, std::string kinds, std::vector<Tensor> operands,
    double epsilon, const std::optional<Tensor>& rows);

Tensor packed_head_linear(
    const Tensor& x, const Tensor& weight, int64_t features, const std::optional<Tensor>& rows);

Tensor float32_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

Tensor quantised_linear(
    const Tensor& x, const Tensor& weight, const Tensor& scales,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& rows);

std::tuple<Tensor, Tensor> quantised_linear_max(
    const Tensor& x, const Tensor& weight, const Tensor& scales,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& rows);

Tensor quantised_experts(
    const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales, const Tensor& down,
    const Tensor& down_scales, const Tensor& expert_ids, const Tensor& expert_weights,
    double limit, bool limit_input, const std::optional<Tensor>& rows);

Tensor gated_delta_rule(
    const Tensor& rows, const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
    const Tensor& recurrent, const Tensor& history, const Tensor& standing,
    const Tensor& state_slots, const Tensor& seq_lens, const Tensor& query_start_loc,
    const Tensor& certain_lens);

Tensor rms_norm(
    const Tensor& x, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows);

std::tuple<Tensor, Tensor> add_rms_norm(
    const Tensor& x, const Tensor& added, const Tensor& weight, double epsilon, bool plus_one,
    const std::optional<Tensor>& rows);

Tensor silu_and_mul(const Tensor& gate_up, const std::optional<Tensor>& rows);

void clear_idle_rows(const Tensor& x, const Tensor& rows, int64_t features);

Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& rows);

Tensor rotate_and_write(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& rows);

std::tuple<Tensor, Tensor, Tensor> accept(
    const Tensor& out_token_ids, const Tensor& num_accepted, const Tensor& num_emitted,
    const Tensor& stop_reason, const Tensor& chosen, const Tensor& finite, const Tensor& ids,
    const Tensor& query_start_loc, const Tensor& context_lens, const Tensor& active,
    const Tensor& remaining_tokens, const Tensor& stop_ids, const Tensor& state_indices,
    const std::optional<Tensor>& is_prompt, const std::optional<Tensor>& goes_on);

Tensor sinkhorn(const Tensor& logits, int64_t rounds, double epsilon);

Tensor sample(
    const Tensor& logits, const Tensor& ids, const Tensor& positions, const Tensor& state_slots,
    const Tensor& floats, const Tensor& ints, const Tensor& bias_ids, const Tensor& bias_values,
    const Tensor& allowed_tokens, const Tensor& prompt_tokens, const Tensor& output_counts,
    const Tensor& stop_ids, const std::optional<Tensor>& token_mask);

void count_tokens(
    const Tensor& output_counts, const Tensor& ids, const Tensor& num_emitted,
    const Tensor& state_slots);

void write_logprobs(
    const Tensor& logprobs, const Tensor& top_ids, const Tensor& top_logprobs,
    const Tensor& logits, const Tensor& ids, const Tensor& num_emitted,
    const Tensor& state_slots, const Tensor& ints);

}  // namespace mtpc
