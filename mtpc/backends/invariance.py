"""Which operators a batch-invariant step may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from mtpc.backends.triton_kernels import NAMESPACES
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.ops.collectives import is_collective
from mtpc.passes.base import GETITEM, Policy

aten = torch.ops.aten

_ROW_BOUND = {
    "slot_attention": "it adds keys of a ring and of the step's own rows apart, so its sums depend "
    "on which tokens are in one step",
    **dict.fromkeys(("skinny_linear", "norm_linear"), "its tiles depend on the rows"),
}
"""Operators of mtpc whose sums depend on other rows nevertheless."""
_MOVES = """
alias as_strided cat chunk clone constant_pad_nd contiguous copy_ detach embedding expand flatten
full_like gather index index_copy_ index_put_ index_select masked_fill movedim new_empty new_full
new_zeros ones_like permute repeat repeat_interleave reshape scatter scatter_ select slice split
split_with_sizes squeeze stack t to _to_copy transpose type_as unbind unflatten _unsafe_view
unsqueeze view where zeros_like
"""
"""ATen operators that only move numbers."""
_COMPARES = "all amax amin any argmax argmin max min sort topk"
"""ATen operators that compare numbers: the order of comparisons does not change the result."""
_EXACT = frozenset(getattr(aten, name) for name in (_MOVES + _COMPARES).split())


@dataclass(frozen=True)
class CheckInvariance:
    """Refuse a bound step in which a row's numbers may depend on how many rows there are.

    Raises:
        BackendError: a call may; the message names it.
    """

    name: ClassVar[str] = "check-batch-invariance"
    policy: ClassVar[Policy] = "required"

    def apply(self, graph: StepGraph) -> int:
        for node in graph.graph.nodes:
            reason = _reason(node) if node.op == "call_function" else None
            if reason is not None:
                call = str(node.target).removesuffix(".default").replace(".", "::", 1)
                raise BackendError(
                    f"batch_invariant is True, and {graph.name} calls {call}: {reason}; "
                    "leave the option out"
                )
        return 0


def _reason(node: fx.Node) -> str | None:
    """Why a call may add numbers in another order with other rows; None where it does not."""
    target: Any = node.target
    if target is GETITEM:
        return None
    if not isinstance(target, OpOverload):
        return "it is no operator that is known to keep the order of its sums"
    name = target._schema.name.partition("::")[2]
    if target.namespace in NAMESPACES:
        return _ROW_BOUND.get(name)
    if is_collective(target):
        return None  # The pass spell-collectives leaves those that only move numbers.
    if target.namespace == "mtpc":
        return "it has no GPU kernel, and PyTorch's sums depend on the rows"
    exact = torch.Tag.pointwise in target.tags or target.overloadpacket in _EXACT
    inputs = [value.meta.get("val") for value in node.all_input_nodes]
    is_float = any(isinstance(value, Tensor) and value.is_floating_point() for value in inputs)
    return None if exact or not is_float else "PyTorch's sums depend on the rows"
