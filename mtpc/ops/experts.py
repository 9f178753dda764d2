"""Mixture-of-experts feed-forward on stacked expert weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.traits import SUM, Cut, Traits, operator

_ROWS = "x expert_ids expert_weights"


@operator(Traits("row", "sums", rows=_ROWS, cuts=(Cut({"gate_up": 1, "down": 2}, SUM),)), "x")
def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float = 0.0,
    limit_input: bool = False,
    gelu: bool = False,
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU feed-forwards, per row.

    A row's result depends on no other row. The sum runs over the experts in index order.

    Args:
        x: [T, H].
        gate_up: [E, 2I, H], gate rows first.
        down: [E, H, I].
        expert_ids: int64 [T, k], distinct per row. An id outside of [0, E) chooses nothing.
        expert_weights: [T, k].
        limit: bounds silu(gate) from above and up on both sides (Step-3.7); 0 is off.
        limit_input: the limit bounds gate itself instead, before silu (DeepSeek-V4).
        gelu: use gelu(gate) in its tanh form instead of silu(gate) (Gemma 4).

    Returns:
        [T, H], dtype of x.
    """

    def run(expert: int) -> Tensor:
        active = swiglu(F.linear(x, gate_up[expert]), limit, limit_input, gelu)
        return F.linear(active, down[expert])

    return _weighted_sum(x, down.shape[0], expert_ids, expert_weights, run)


def _weighted_sum(
    x: Tensor, count: int, expert_ids: Tensor, expert_weights: Tensor, run: Callable[[int], Tensor]
) -> Tensor:
    """The weighted sum of the chosen experts' results, each of all rows, in index order."""
    out = x.new_zeros(x.shape)
    for expert in range(count):
        chosen = expert_ids == expert
        weight = (expert_weights * chosen).sum(1, keepdim=True).to(x.dtype)
        out = torch.where(chosen.any(1, keepdim=True), out + run(expert) * weight, out)
    return out


@operator(Traits("row", "sums", rows=_ROWS, cuts=(Cut({"up": 1, "down": 2}, SUM),)), "x")
def relu2_experts(
    x: Tensor, up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """`experts` without gates: down(relu(up(x))^2), per row. Arguments are those of `experts`, with
    up [E, I, H] instead of gate_up, and distinct ids per row. Returns [T, H], dtype of x."""

    def run(expert: int) -> Tensor:
        return F.linear(squared_relu(F.linear(x, up[expert])), down[expert])

    return _weighted_sum(x, down.shape[0], expert_ids, expert_weights, run)


def spelled_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float,
    alpha: float,
) -> Tensor:
    """`biased_experts` in PyTorch's own operators, for steps that no kernel of it serves."""

    def run(expert: int) -> Tensor:
        both = F.linear(x, gate_up[expert].T, gate_up_bias[expert])
        return F.linear(clamped_swiglu(both, limit, alpha), down[expert].T, down_bias[expert])

    return _weighted_sum(x, down.shape[0], expert_ids, expert_weights, run)


@operator(Traits("row", "sums", rows=_ROWS), "x")
def biased_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float,
    alpha: float,
) -> Tensor:
    """`experts` as gpt-oss has them: with biases, and stacks with inputs before features.

    Arguments are those of `experts`, with gate_up [E, H, 2I], the features of gate and up in turns,
    down [E, I, H], biases [E, 2I], in the same order, and [E, H]. `limit` bounds gate from above
    and up on both sides; `alpha` is the activation's, see `clamped_swiglu`. Returns [T, H], dtype
    of x.
    """
    weights = (gate_up, gate_up_bias, down, down_bias)
    return spelled_experts(x, *weights, expert_ids, expert_weights, limit, alpha)


def sum_experts(
    x: Tensor,
    count: int,
    expert_ids: Tensor,
    expert_weights: Tensor,
    run: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of `count` experts in float32, with each expert computed by `run`: (expert,
    x in float32) -> its result, float32 [T, H]."""
    numbers, out = x.float(), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(count):
        chosen = expert_ids == expert
        weight = (expert_weights.float() * chosen).sum(1, keepdim=True)
        added = run(expert, numbers) * weight
        out = torch.where(chosen.any(1, keepdim=True), out + added, out)
    return out


def swiglu(gate_up: Tensor, limit: float, limit_input: bool, gelu: bool = False) -> Tensor:
    """silu(gate) * up of [..., 2I], gate first, with the bounds and the GELU of `experts`."""
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = (gate.clamp(max=limit) if limit_input else gate), up.clamp(-limit, limit)
    gate = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    if limit > 0 and not limit_input:
        gate = gate.clamp(max=limit)
    return gate * up


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) of [..., 2I] in turns, bounded as `biased_experts` says."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def squared_relu(rows: Tensor) -> Tensor:
    """relu(rows)^2, the activation of `relu2_experts`."""
    return rows.relu().square()
