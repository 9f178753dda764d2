"""Experts without gates: the launches of `experts`, with another activation."""

from __future__ import annotations

from torch import Tensor

from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.experts import expert_plan


@operator()
def relu2_experts(
    x: Tensor, up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Sort the choices; relu(up)^2; the down projection; the sum over experts.

    Raises:
        BackendError: elements of a weight's row are not adjacent in memory.
    """
    form = dict(LIMIT=0.0, LIMIT_INPUT=False, GELU=False, GATED=False)
    return expert_plan(x, up, down, expert_ids, expert_weights, form, batch_invariant)
