"""A linear layer of a few rows; see `skinny`."""

from __future__ import annotations

from torch import Tensor

from mtpc.backends.triton_kernels.launch import adjacent, flat_rows
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.skinny import skinny_launch, skinny_limit


@operator(limit=skinny_limit, row_bound="its tiles depend on the rows")
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Plan:
    """One launch."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if x.numel() == 0:
        return [], out
    return [skinny_launch(flat_rows(x), adjacent(weight, "a weight"), bias, out)], out
