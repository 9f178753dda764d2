"""Which operators a batch-invariant step may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from mtpc.backends.triton_kernels import NAMESPACES, row_bound
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.ops.traits import traits_of
from mtpc.passes.base import GETITEM, Pass


@dataclass(frozen=True)
class CheckInvariance(Pass, policy="required", name="check-batch-invariance"):
    """Refuse a bound step in which a row's numbers may depend on how many rows there are.

    Raises:
        BackendError: a call may; the message names it.
    """

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
    if target.namespace in NAMESPACES:
        return row_bound(node)
    from mtpc.backends import aiter  # A start on a CPU needs nothing of it.

    of_aiter = aiter.row_bound(node)
    if of_aiter is not None:
        return of_aiter
    if traits_of(target).arithmetic != "sums":
        return None
    if target.namespace == "mtpc":
        return "it has no GPU kernel, and PyTorch's sums depend on the rows"
    inputs = [value.meta.get("val") for value in node.all_input_nodes]
    is_float = any(isinstance(value, Tensor) and value.is_floating_point() for value in inputs)
    return "PyTorch's sums depend on the rows" if is_float else None
