"""Mixture-of-experts feed-forward on stacked expert weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.traits import SUM, Cut, Traits, as_first, operator

_ROWS = "x expert_ids expert_weights"


@operator(Traits("row", "sums", rows=_ROWS, cuts=(Cut({"gate_up": 1, "down": 2}, SUM),)))
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

    def activate(rows: Tensor) -> Tensor:
        return swiglu(rows, limit, limit_input, gelu)

    return _weighted_sum(x, gate_up, down, expert_ids, expert_weights, activate)


def _weighted_sum(
    x: Tensor,
    first: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """The chosen experts' down(activate(first(x))), in index order."""
    out = x.new_zeros(x.shape)
    for expert in range(first.shape[0]):
        chosen = expert_ids == expert
        weight = (expert_weights * chosen).sum(1, keepdim=True).to(x.dtype)
        rows = F.linear(activate(F.linear(x, first[expert])), down[expert]) * weight
        out = torch.where(chosen.any(1, keepdim=True), out + rows, out)
    return out


@operator(Traits("row", "sums", rows=_ROWS, cuts=(Cut({"up": 1, "down": 2}, SUM),)))
def relu2_experts(
    x: Tensor, up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """`experts` without gates: down(relu(up(x))^2), per row.

    Args:
        x: [T, H].
        up: [E, I, H].
        down: [E, H, I].
        expert_ids: int64 [T, k], distinct per row.
        expert_weights: [T, k].

    Returns:
        [T, H], dtype of x.
    """
    return _weighted_sum(x, up, down, expert_ids, expert_weights, squared_relu)


def sum_experts(
    x: Tensor,
    count: int,
    expert_ids: Tensor,
    expert_weights: Tensor,
    run: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of `experts` in float32, with each expert computed by `run`.

    Args:
        x: [T, H].
        count: number of experts.
        expert_ids: as in `experts`.
        expert_weights: as there.
        run: (expert, x in float32) -> its result, float32 [T, H].

    Returns:
        float32 [T, H].
    """
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


def squared_relu(rows: Tensor) -> Tensor:
    """relu(rows)^2, the activation of `relu2_experts`."""
    return rows.relu().square()


relu2_experts.register_fake(as_first)
experts.register_fake(as_first)
