"""lower-choices: how routers choose experts, by an operator with a GPU kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.largest import TOPK_COUNT, TOPK_WIDTH
from mtpc.passes.base import Policy, emit, is_call

aten = torch.ops.aten


@dataclass(frozen=True)
class LowerChoices:
    """Replace ATen's choices of the largest numbers of a row by operators that GPUs run faster.

    A router's `topk` becomes `mtpc::topk`: ATen's kernels for it are made for long rows, and take
    several launches. Of equal numbers ATen may choose any, and the operator chooses the first.
    Wider rows, and longer choices, stay ATen's. On by default on GPUs.
    """

    name: ClassVar[str] = "lower-choices"
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        return sum(_lower_topk(graph.graph, node) for node in list(graph.graph.nodes))


def _lower_topk(graph: fx.Graph, node: fx.Node) -> bool:
    """Exchange a topk of narrow rows; returns whether it did."""
    if not is_call(node, aten.topk.default):
        return False
    given = arguments(node)
    x, count = given["self"], given["k"]
    if not (given["largest"] and _chooses_in_rows(x, given["dim"])):
        return False
    if x.meta["val"].shape[-1] > TOPK_WIDTH or not 0 < count <= TOPK_COUNT:
        return False
    _exchange(graph, node, torch.ops.mtpc.topk.default, (x, count))
    return True


def _chooses_in_rows(x: fx.Node, dim: Any) -> bool:
    """Whether a choice is among floats of at most 32 bits of the last dimension."""
    value: Tensor = x.meta["val"]
    is_last = value.dim() > 0 and dim in (-1, value.dim() - 1)
    return is_last and value.is_floating_point() and value.dtype.itemsize in (2, 4)


def _exchange(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(emit(graph, target, args, node))
    graph.erase_node(node)
