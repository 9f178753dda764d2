"""Linear layers and experts on int8 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtpc.ops.experts import sum_experts, swiglu
from mtpc.ops.ragged import keep_rows
from mtpc.weights.packing import LARGEST, ZERO, unpack


@torch.library.custom_op("mtpc::quantised_linear", mutates_args=())
def quantised_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T + bias. W has one scale a row, and x is rounded to int8 with one scale a row, too.

    Sums of products are exact integers. (Dettmers et al., LLM.int8(), arXiv:2208.07339, without
    its outlier columns.)

    Args:
        x: floating point [..., K].
        weight: uint8 [ceil(N / 32), K / 4, 32, 4], as `mtpc.weights.packing.quantise` makes it.
        scales: float32 [N], as `mtpc.weights.packing.row_scales` makes them.
        bias: [N].
        rows: as in `packed_linear`.

    Returns:
        [..., N], of x's dtype.
    """
    numbers = x.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # Divided as the kernel divides: torch multiplies a number over a tensor by its reciprocal.
    inverse = torch.full_like(largest, LARGEST) / largest
    integers = torch.round(numbers * torch.where(largest == 0, 0.0, inverse))
    wide = unpack(weight, scales.shape[0]).double() - ZERO
    # Exact: integers below 2^53.
    sums = (integers.double() @ wide.t()).float()
    out = sums * (largest / LARGEST * scales)
    return keep_rows((out if bias is None else out + bias.float()).to(x.dtype), rows)


@quantised_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


@torch.library.custom_op("mtpc::quantised_linear_max", mutates_args=())
def quantised_linear_max(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest feature of `quantised_linear` of bfloat16 x; else as `packed_linear_max`."""
    values, indices = quantised_linear(x, weight, scales, bias, rows).max(-1)
    return values, indices


@quantised_linear_max.register_fake
def _(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)


@torch.library.custom_op("mtpc::quantised_experts", mutates_args=())
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
    rows: Tensor | None = None,
) -> Tensor:
    """`mtpc::experts` with the products of `mtpc::quantised_linear`, in float32 between them.

    Args:
        x: floating point [T, H].
        gate_up: uint8 [E, 2I / 32, H / 4, 32, 4]; I is a multiple of 32.
        gate_up_scales: float32 [E, 2I].
        down: uint8 [E, ceil(H / 32), I / 4, 32, 4].
        down_scales: float32 [E, H].
        expert_ids: int64 [T, k], distinct per row.
        expert_weights: [T, k].
        limit: as in `mtpc::experts`.
        limit_input: as there.
        rows: as in `packed_linear`; a row that is not in use chooses no expert.

    Returns:
        [T, H], of x's dtype.
    """

    def run(expert: int, numbers: Tensor) -> Tensor:
        both = quantised_linear(numbers, gate_up[expert], gate_up_scales[expert])
        active = swiglu(both, limit, limit_input)
        return quantised_linear(active, down[expert], down_scales[expert])

    out = sum_experts(x, down.shape[0], expert_ids, expert_weights, run)
    return keep_rows(out.to(x.dtype), rows)


@quantised_experts.register_fake
def _(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)
