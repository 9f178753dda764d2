"""What each operator launches: its launches and its result, from its own arguments.

Arguments are those of `mtpc.ops`, real or fake. Nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.triton_kernels.accept import accept_launches
from mtpc.backends.triton_kernels.activation import silu_and_mul_launches
from mtpc.backends.triton_kernels.attention import paged_attention_launches
from mtpc.backends.triton_kernels.cache_write import write_cache_launches
from mtpc.backends.triton_kernels.choose_slots import choose_slots_launches
from mtpc.backends.triton_kernels.configs import apply_configs
from mtpc.backends.triton_kernels.experts import expert_launches
from mtpc.backends.triton_kernels.gated_delta import gated_delta_launches
from mtpc.backends.triton_kernels.latent import latent_attention_launches
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.norms import (
    add_rms_norm_launches,
    draft_entry_launches,
    rms_norm_launches,
)
from mtpc.backends.triton_kernels.quantised import quantised_linear_launches
from mtpc.backends.triton_kernels.quantised_experts import quantised_expert_launches
from mtpc.backends.triton_kernels.records import (
    count_tokens_launches,
    write_logprobs_launches,
)
from mtpc.backends.triton_kernels.rotary import rotate_and_write_launches, rotate_launches
from mtpc.backends.triton_kernels.sampling import sample_launches
from mtpc.backends.triton_kernels.sinkhorn import sinkhorn_launches
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.ops.accept import empty_outcome

Plan = tuple[list[Launch], Tensor | tuple[Tensor, ...] | None]


def plan_write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> Plan:
    """`mtpc::write_cache`."""
    return write_cache_launches(cache, rows, slot_mapping), None


def plan_paged_attention(  # type: ignore[no-untyped-def]
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table, seq_lens, query_start_loc,
    scale: float, sliding_window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Plan:  # fmt: skip
    """`mtpc::paged_attention`."""
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))
    indices = (block_table, seq_lens, query_start_loc)
    options = (scale, sliding_window, softcap)
    return paged_attention_launches((q, k_cache, v_cache), indices, out, options, sinks), out


def plan_latent_attention(  # type: ignore[no-untyped-def]
    q: Tensor, latent_cache: Tensor, block_table, seq_lens, query_start_loc,
    scale: float, latent_rank: int,
) -> Plan:  # fmt: skip
    """`mtpc::latent_attention`."""
    out = q.new_empty((q.shape[0], q.shape[1], latent_rank))
    indices = (block_table, seq_lens, query_start_loc)
    return latent_attention_launches(q, latent_cache, indices, out, scale), out


def plan_choose_slots(  # type: ignore[no-untyped-def]
    query: Tensor, weights: Tensor, index_cache: Tensor, block_table, seq_lens, query_start_loc,
    count: int,
) -> Plan:  # fmt: skip
    """`mtpc::choose_slots`."""
    most = min(count, block_table.shape[1] * index_cache.shape[1])
    out = query.new_full((query.shape[0], most), -1, dtype=torch.int32)
    indices = (block_table, seq_lens, query_start_loc)
    return choose_slots_launches(query, weights, index_cache, indices, out), out


def plan_count_tokens(
    output_counts: Tensor, ids: Tensor, num_emitted: Tensor, state_slots: Tensor
) -> Plan:
    """`mtpc::count_tokens`."""
    return count_tokens_launches(output_counts, ids, num_emitted, state_slots), None


def plan_write_logprobs(
    logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor,
    ids: Tensor, num_emitted: Tensor, state_slots: Tensor, ints: Tensor,
) -> Plan:  # fmt: skip
    """`mtpc::write_logprobs`."""
    reports = (logprobs, top_ids, top_logprobs)
    return write_logprobs_launches(reports, logits, (ids, num_emitted), state_slots, ints), None


def plan_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    limit: float = 0.0, limit_input: bool = False,
) -> Plan:  # fmt: skip
    """`mtpc::experts`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return [], out
    choices, bound = (expert_ids, expert_weights), (limit, limit_input)
    return expert_launches(x, (gate_up, down), choices, out, bound), out


def plan_gated_delta_rule(
    rows: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    recurrent: Tensor, history: Tensor, standing: Tensor,
    state_slots: Tensor, seq_lens: Tensor, query_start_loc: Tensor, certain_lens: Tensor,
) -> Plan:  # fmt: skip
    """`mtpc::gated_delta_rule`."""
    weights, state = (conv_weight, a_log, dt_bias), (recurrent, history, standing)
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    out = rows.new_empty((rows.shape[0], recurrent.shape[1], recurrent.shape[3]))
    return gated_delta_launches(rows, weights, state, indices, out), out


def plan_quantised_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Plan:
    """`mtpc::quantised_linear`."""
    flat = x.reshape(-1, x.shape[-1])
    out = x.new_empty((flat.shape[0], scales.shape[0]))
    launches = quantised_linear_launches(flat, weight, scales, bias, out) if len(flat) else []
    return launches, out.view(*x.shape[:-1], -1)


def plan_quantised_experts(
    x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, down: Tensor, down_scales: Tensor,
    expert_ids: Tensor, expert_weights: Tensor, limit: float = 0.0, limit_input: bool = False,
) -> Plan:  # fmt: skip
    """`mtpc::quantised_experts`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return [], out
    wide, narrow, choices = (
        (gate_up, gate_up_scales),
        (down, down_scales),
        (expert_ids, expert_weights),
    )
    return quantised_expert_launches(x, wide, narrow, choices, out, (limit, limit_input)), out


def plan_rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Plan:  # fmt: skip
    """`mtpc::rotate_and_write`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return [], out
    rows, caches = (q, k, v), (k_cache, v_cache)
    return rotate_and_write_launches(rows, (cos, sin), caches, slot_mapping, out), out


def plan_sample(
    logits: Tensor, ids: Tensor, positions: Tensor, state_slots: Tensor,
    floats: Tensor, ints: Tensor, bias_ids: Tensor, bias_values: Tensor, allowed_tokens: Tensor,
    prompt_tokens: Tensor, output_counts: Tensor, stop_ids: Tensor,
    token_mask: Tensor | None = None,
) -> Plan:  # fmt: skip
    """`mtpc::sample`."""
    out = ids.new_full((logits.shape[0],), -1)
    tokens = (allowed_tokens, prompt_tokens, output_counts, stop_ids)
    state = (floats, ints, bias_ids, bias_values, *tokens)
    rows = (logits, ids, positions, state_slots)
    return sample_launches(*rows, state, token_mask, out) if len(ids) else [], out


def plan_rms_norm(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False) -> Plan:
    """`mtpc::rms_norm`."""
    out = x.new_empty(x.shape)
    return rms_norm_launches(x, weight, epsilon, plus_one, out) if x.numel() else [], out


def plan_add_rms_norm(
    x: Tensor, added: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False
) -> Plan:
    """`mtpc::add_rms_norm`."""
    results = (x.new_empty(x.shape), x.new_empty(x.shape))
    if x.numel() == 0:
        return [], results
    return add_rms_norm_launches((x, added), weight, epsilon, plus_one, results), results


def plan_draft_entry(
    left: Tensor, left_weight: Tensor, right: Tensor, right_weight: Tensor,
    epsilon: float, plus_one: bool = False,
) -> Plan:  # fmt: skip
    """`mtpc::draft_entry`."""
    out = left.new_empty((*left.shape[:-1], 2 * left.shape[-1]))
    if left.numel() == 0:
        return [], out
    halves = ((left, left_weight), (right, right_weight))
    return draft_entry_launches(*halves, epsilon, plus_one, out), out


def plan_silu_and_mul(gate_up: Tensor) -> Plan:
    """`mtpc::silu_and_mul`."""
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    return silu_and_mul_launches(gate_up, out) if out.numel() else [], out


def plan_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Plan:
    """`mtpc::rotate`."""
    out = x.new_empty(x.shape)
    return rotate_launches(x, cos, sin, out) if len(x) else [], out


def plan_accept(  # type: ignore[no-untyped-def]
    out_token_ids: Tensor, num_accepted, num_emitted, stop_reason,
    chosen: Tensor, finite: Tensor, ids: Tensor, query_start_loc, context_lens, active,
    remaining_tokens, stop_ids, state_indices,
    is_prompt: Tensor | None = None, goes_on: Tensor | None = None,
) -> Plan:  # fmt: skip
    """`mtpc::accept`."""
    out = empty_outcome(context_lens)
    rows = (ids, query_start_loc, context_lens, active)
    reports = (out_token_ids, num_accepted, num_emitted, stop_reason)
    limits = (remaining_tokens, stop_ids, state_indices)
    prompts = (is_prompt, goes_on)
    return accept_launches(reports, (chosen, finite), rows, limits, prompts, out), out


def plan_sinkhorn(logits: Tensor, rounds: int, epsilon: float) -> Plan:
    """`mtpc::sinkhorn`."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return sinkhorn_launches(logits, rounds, epsilon, out) if len(logits) else [], out


PLANS: dict[str, Callable[..., Plan]] = {
    "write_cache": plan_write_cache,
    "rms_norm": plan_rms_norm,
    "add_rms_norm": plan_add_rms_norm,
    "draft_entry": plan_draft_entry,
    "silu_and_mul": plan_silu_and_mul,
    "rotate": plan_rotate,
    "paged_attention": plan_paged_attention,
    "latent_attention": plan_latent_attention,
    "choose_slots": plan_choose_slots,
    "count_tokens": plan_count_tokens,
    "write_logprobs": plan_write_logprobs,
    "experts": plan_experts,
    "gated_delta_rule": plan_gated_delta_rule,
    "quantised_linear": plan_quantised_linear,
    "quantised_experts": plan_quantised_experts,
    "rotate_and_write": plan_rotate_and_write,
    "sample": plan_sample,
    "accept": plan_accept,
    "sinkhorn": plan_sinkhorn,
}
"""Every op exists as mtpc::NAME, the reference, and as mtpc_triton::NAME."""


NAMESPACES = ("mtpc_triton", "mtpc_loaded")


def plan(name: str, *args: Any, configs: str = "", **kwargs: Any) -> Plan:
    """What an operator launches, in the configurations that its argument `configs` names.

    Raises:
        BackendError: they are not configurations of these launches.
    """
    launches, out = PLANS[name](*args, **kwargs)
    return apply_configs(launches, configs), out


def step_launches(graph: StepGraph) -> list[Launch]:
    """What a legalised step launches of our kernels, in order, on fake tensors."""
    launches: list[Launch] = []
    with fake_mode_of(graph.graph):
        for node in graph.graph.nodes:
            namespace = str(node.target).partition(".")[0]
            if node.op == "call_function" and namespace in NAMESPACES:
                launches += node_launches(node)
    return launches


def node_launches(node: fx.Node, configs: str | None = None) -> list[Launch]:
    """What one call launches, of an operator of ours or of its reference; in a fake mode.

    Args:
        node: the call.
        configs: in which configurations, if not in those that the call itself names.
    """
    args = fx.node.map_aggregate(node.args, _value)
    kwargs: dict[str, Any] = dict(fx.node.map_aggregate(node.kwargs, _value))
    if configs is not None:
        kwargs["configs"] = configs
    return plan(op_name(node), *args, **kwargs)[0]


def op_name(node: fx.Node) -> str:
    """Of an operator of ours or its reference, without the namespace."""
    _, name, _ = str(node.target).split(".")
    return name


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
