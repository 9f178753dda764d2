"""fuse-head-max: the most likely token, without logits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import GETITEM, Policy, emit, emit_named, is_call, operands, sweep

aten = torch.ops.aten

_MAXIMA: dict[Any, Any] = {
    torch.ops.mtpc.grouped_linear.default: torch.ops.mtpc.grouped_linear_max.default,
    torch.ops.mtpc.packed_linear.default: torch.ops.mtpc.packed_linear_max.default,
}
"""Linear op -> the op that returns only the largest feature of its result."""


@dataclass(frozen=True)
class FuseHeadMax:
    """Replace a packed head whose logits are only reduced to their maximum.

    The new op is `mtpc::packed_linear_max` or `mtpc::grouped_linear_max`. A greedy choice reads all
    logits once, right after the head writes them, and Inductor's code for it uses few threads.
    The new op reduces each tile of logits as soon as the tile is computed. That costs almost
    nothing and needs no memory for logits. Sampling and log-probabilities read logits in other
    ways, so the pass leaves those heads alone. On by default on backends with such kernels (cpu).
    """

    name: ClassVar[str] = "fuse-head-max"
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in list(graph.graph.nodes):
            if (head := _head_of(node)) is not None:
                _exchange(graph.graph, node, head)
                rewrites += 1
        return sweep(graph, rewrites)


def _head_of(node: fx.Node) -> fx.Node | None:
    """The packed linear whose largest feature a node computes, if nothing else reads it."""
    if not is_call(node, aten.max.dim, aten.argmax.default):
        return None
    head, dim = operands(node, node.target, 2)
    if not (dim == -1 and is_call(head, *_MAXIMA) and list(head.users) == [node]):
        return None
    return head if head.meta["val"].dtype == torch.bfloat16 else None


def _exchange(graph: fx.Graph, node: fx.Node, head: fx.Node) -> None:
    with graph.inserting_before(node):
        both = emit_named(graph, _MAXIMA[head.target], arguments(head), node)
        index = emit(graph, GETITEM, (both, 1), node)
    node.replace_all_uses_with(both if is_call(node, aten.max.dim) else index)
