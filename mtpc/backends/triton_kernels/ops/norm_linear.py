"""The residual sum, its norm, and the linear layer that reads it, of a few rows; see `skinny`."""

from __future__ import annotations

from torch import Tensor

from mtpc.backends.triton_kernels.launch import adjacent, flat_rows
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.skinny import skinny_launch, skinny_limit


@operator(limit=skinny_limit, row_bound="its tiles depend on the rows")
def norm_linear(
    x: Tensor, added: Tensor, norm_weight: Tensor, epsilon: float, plus_one: bool, weight: Tensor,
    bias: Tensor | None, gated: bool,
) -> Plan:  # fmt: skip
    """One launch."""
    features = weight.shape[0] // (2 if gated else 1)
    total, out = results = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], features))
    if x.numel() == 0:
        return [], results
    norm = (flat_rows(added), norm_weight.contiguous(), total, epsilon, plus_one)
    weight = adjacent(weight, "a weight")
    return [skinny_launch(flat_rows(x), weight, bias, out, gated, norm)], results
