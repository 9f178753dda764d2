"""fuse-head-max: the most likely token, without logits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import GETITEM, Pass, aten, emit, emit_named, exchange, is_call, operands

_MAXIMA: dict[Any, Any] = {
    torch.ops.mtpc.grouped_linear.default: torch.ops.mtpc.grouped_linear_max.default,
    torch.ops.mtpc.packed_linear.default: torch.ops.mtpc.packed_linear_max.default,
}
"""Linear op -> the op that returns only the largest feature of its result."""


@dataclass(frozen=True)
class FuseHeadMax(Pass, policy="backend"):
    """Replace a packed head whose logits are only reduced to their maximum.

    The new op is `mtpc::packed_linear_max` or `mtpc::grouped_linear_max`. A greedy choice reads all
    logits once, right after the head writes them, and Inductor's code for it uses few threads.
    The new op reduces each tile of logits as soon as the tile is computed. That costs almost
    nothing and needs no memory for logits. Sampling and log-probabilities read logits in other
    ways, so the pass leaves those heads alone. On by default on backends with such kernels (cpu).
    """

    def apply(self, graph: StepGraph) -> int:
        return exchange(graph, [node for node in graph.graph.nodes if _is_choice(node)], _maximum)


def _is_choice(node: fx.Node) -> bool:
    """Whether a node computes the largest feature of a packed linear that nothing else reads."""
    if not is_call(node, aten.max.dim, aten.argmax.default):
        return False
    head, dim = operands(node, node.target, 2)
    if not (dim == -1 and is_call(head, *_MAXIMA) and list(head.users) == [node]):
        return False
    return bool(head.meta["val"].dtype == torch.bfloat16)


def _maximum(graph: StepGraph, node: fx.Node) -> fx.Node:
    head = arguments(node)["self"]
    both = emit_named(graph.graph, _MAXIMA[head.target], arguments(head), node)
    is_index = is_call(node, aten.argmax.default)
    return emit(graph.graph, GETITEM, (both, 1), node) if is_index else both
