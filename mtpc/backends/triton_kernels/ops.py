"""The kernels as operators; importing this needs Triton and registers them.

Each exists twice. `mtpc_triton::` leaves its launches visible to Inductor, which then plans their
memory, and compiles them itself. `mtpc_loaded::` launches as a plain Triton program does, so that
code objects which Triton finds in its cache are used (`loading`); inside a device graph, where
launches cost nothing, that is all the difference. `mtpc.ops` says what each operator means; the one
argument more, `configs`, says how kernels that have a choice are run (`configs`, "": by default).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import custom_op, triton_op

from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.plans import plan
from mtpc.ops.accept import REPORTS


def write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor, *, configs: str = "") -> None:
    """`mtpc::write_cache`."""
    _run_in_place("write_cache", cache, rows, slot_mapping, configs=configs)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::paged_attention`."""
    indices = (block_table, seq_lens, query_start_loc)
    options = (scale, sliding_window, softcap, sinks)
    return _run("paged_attention", q, k_cache, v_cache, *indices, *options, configs=configs)


def latent_attention(
    q: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_rank: int,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::latent_attention`."""
    indices = (block_table, seq_lens, query_start_loc)
    options = (scale, latent_rank)
    return _run("latent_attention", q, latent_cache, *indices, *options, configs=configs)


def choose_slots(
    query: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    count: int,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::choose_slots`."""
    indices = (block_table, seq_lens, query_start_loc)
    return _run("choose_slots", query, weights, index_cache, *indices, count, configs=configs)


def count_tokens(
    output_counts: Tensor,
    ids: Tensor,
    num_emitted: Tensor,
    state_slots: Tensor,
    *,
    configs: str = "",
) -> None:
    """`mtpc::count_tokens`."""
    _run_in_place("count_tokens", output_counts, ids, num_emitted, state_slots, configs=configs)


def write_logprobs(
    logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    logits: Tensor,
    ids: Tensor,
    num_emitted: Tensor,
    state_slots: Tensor,
    ints: Tensor,
    *,
    configs: str = "",
) -> None:
    """`mtpc::write_logprobs`."""
    reports, emitted = (logprobs, top_ids, top_logprobs), (ids, num_emitted)
    _run_in_place("write_logprobs", *reports, logits, *emitted, state_slots, ints, configs=configs)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float = 0.0,
    limit_input: bool = False,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::experts`."""
    choices, bound = (expert_ids, expert_weights), (limit, limit_input)
    return _run("experts", x, gate_up, down, *choices, *bound, configs=configs)


def gated_delta_rule(
    rows: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    recurrent: Tensor,
    history: Tensor,
    standing: Tensor,
    state_slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    certain_lens: Tensor,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::gated_delta_rule`."""
    weights, state = (conv_weight, a_log, dt_bias), (recurrent, history, standing)
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    return _run("gated_delta_rule", rows, *weights, *state, *indices, configs=configs)


def quantised_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, configs: str = ""
) -> Tensor:
    """`mtpc::quantised_linear`."""
    return _run("quantised_linear", x, weight, scales, bias, configs=configs)


def quantised_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float = 0.0,
    limit_input: bool = False,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::quantised_experts`."""
    forms = (gate_up, gate_up_scales, down, down_scales)
    choices, bound = (expert_ids, expert_weights), (limit, limit_input)
    return _run("quantised_experts", x, *forms, *choices, *bound, configs=configs)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::rotate_and_write`."""
    rows, caches = (q, k, v), (k_cache, v_cache)
    return _run("rotate_and_write", *rows, cos, sin, *caches, slot_mapping, configs=configs)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False, *, configs: str = ""
) -> Tensor:
    """`mtpc::rms_norm`."""
    return _run("rms_norm", x, weight, epsilon, plus_one, configs=configs)


def add_rms_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool = False,
    *,
    configs: str = "",
) -> tuple[Tensor, Tensor]:
    """`mtpc::add_rms_norm`."""
    launches, out = plan("add_rms_norm", x, added, weight, epsilon, plus_one, configs=configs)
    run(launches)
    assert isinstance(out, tuple)
    total, normed = out
    return total, normed


def draft_entry(
    left: Tensor,
    left_weight: Tensor,
    right: Tensor,
    right_weight: Tensor,
    epsilon: float,
    plus_one: bool = False,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::draft_entry`."""
    halves = (left, left_weight, right, right_weight)
    return _run("draft_entry", *halves, epsilon, plus_one, configs=configs)


def silu_and_mul(gate_up: Tensor, *, configs: str = "") -> Tensor:
    """`mtpc::silu_and_mul`."""
    return _run("silu_and_mul", gate_up, configs=configs)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, configs: str = "") -> Tensor:
    """`mtpc::rotate`."""
    return _run("rotate", x, cos, sin, configs=configs)


def sample(
    logits: Tensor,
    ids: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    floats: Tensor,
    ints: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    allowed_tokens: Tensor,
    prompt_tokens: Tensor,
    output_counts: Tensor,
    stop_ids: Tensor,
    token_mask: Tensor | None = None,
    *,
    configs: str = "",
) -> Tensor:
    """`mtpc::sample`."""
    numbers = (floats, ints, bias_ids, bias_values)
    tokens = (allowed_tokens, prompt_tokens, output_counts, stop_ids, token_mask)
    rows = (logits, ids, positions, state_slots)
    return _run("sample", *rows, *numbers, *tokens, configs=configs)


def accept(
    out_token_ids: Tensor,
    num_accepted: Tensor,
    num_emitted: Tensor,
    stop_reason: Tensor,
    chosen: Tensor,
    finite: Tensor,
    ids: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    active: Tensor,
    remaining_tokens: Tensor,
    stop_ids: Tensor,
    state_indices: Tensor,
    is_prompt: Tensor | None = None,
    goes_on: Tensor | None = None,
    *,
    configs: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """`mtpc::accept`."""
    reports = (out_token_ids, num_accepted, num_emitted, stop_reason)
    rows = (chosen, finite, ids, query_start_loc, context_lens, active)
    limits = (remaining_tokens, stop_ids, state_indices, is_prompt, goes_on)
    launches, out = plan("accept", *reports, *rows, *limits, configs=configs)
    run(launches)
    assert isinstance(out, tuple)
    anchors, remaining, lens = out
    return anchors, remaining, lens


def sinkhorn(logits: Tensor, rounds: int, epsilon: float, *, configs: str = "") -> Tensor:
    """`mtpc::sinkhorn`."""
    return _run("sinkhorn", logits, rounds, epsilon, configs=configs)


def _run(name: str, *args: Any, configs: str) -> Tensor:
    launches, out = plan(name, *args, configs=configs)
    run(launches)
    assert isinstance(out, Tensor)
    return out


def _run_in_place(name: str, *args: Any, configs: str) -> None:
    launches, _ = plan(name, *args, configs=configs)
    run(launches)


_STATE = ("recurrent", "history", "standing")
_OPERATORS: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (write_cache, ("cache",)),
    (paged_attention, ()),
    (latent_attention, ()),
    (choose_slots, ()),
    (count_tokens, ("output_counts",)),
    (write_logprobs, ("logprobs", "top_ids", "top_logprobs")),
    (experts, ()),
    (gated_delta_rule, _STATE),
    (quantised_linear, ()),
    (quantised_experts, ()),
    (rms_norm, ()),
    (add_rms_norm, ()),
    (draft_entry, ()),
    (silu_and_mul, ()),
    (rotate, ()),
    (rotate_and_write, ("k_cache", "v_cache")),
    (sample, ()),
    (accept, REPORTS),
    (sinkhorn, ()),
)
"""Every operator, with the arguments that it writes."""


def _register() -> None:
    for function, written in _OPERATORS:
        name = function.__name__
        triton_op(f"mtpc_triton::{name}", function, mutates_args=written)
        loaded = custom_op(f"mtpc_loaded::{name}", function, mutates_args=written)
        loaded.register_fake(_fake(name))


def _fake(name: str) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return plan(name, *args, **kwargs)[1]

    return fake


_register()
