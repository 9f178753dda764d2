"""lower-choices: how routers and greedy heads choose, by operators with kernels for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.largest import LEAST_ROW_MAX, TOPK_COUNT, TOPK_WIDTH
from mtpc.passes.base import GETITEM, Policy, emit, is_call
from mtpc.passes.patterns import operands

aten = torch.ops.aten


@dataclass(frozen=True)
class LowerChoices:
    """Replace ATen's choices of the largest numbers of a row by operators that GPUs run faster.

    A router's `topk` becomes `mtpc::topk`: ATen's kernels for it are made for long rows, and take
    several launches. Of equal numbers ATen may choose any, and the operator chooses the first.
    Wider rows, and longer choices, stay ATen's.

    The largest of a row of logits becomes `mtpc::row_max`, which has many programs for a row.
    Inductor has one, and for short rows it stays Inductor's. On by default on GPUs.
    """

    name: ClassVar[str] = "lower-choices"
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        return sum(
            lower(graph.graph, node)
            for node in list(graph.graph.nodes)
            for lower in (_lower_topk, _lower_max)
        )


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
    with graph.inserting_before(node):
        node.replace_all_uses_with(emit(graph, torch.ops.mtpc.topk.default, (x, count), node))
    graph.erase_node(node)
    return True


def _lower_max(graph: fx.Graph, node: fx.Node) -> bool:
    """Exchange the largest of wide rows, or its place; returns whether it did."""
    if not is_call(node, aten.max.dim, aten.argmax.default):
        return False
    x, dim = operands(node, node.target, 2)
    if x is None or not _chooses_in_rows(x, dim) or x.meta["val"].shape[-1] < LEAST_ROW_MAX:
        return False
    with graph.inserting_before(node):
        both = emit(graph, torch.ops.mtpc.row_max.default, (x,), node)
        if node.target is aten.argmax.default:
            both = emit(graph, GETITEM, (both, 1), node)
    node.replace_all_uses_with(both)
    graph.erase_node(node)
    return True


def _chooses_in_rows(x: fx.Node, dim: Any) -> bool:
    """Whether a choice is among floats of at most 32 bits of the last dimension."""
    value: Tensor = x.meta["val"]
    is_last = value.dim() > 0 and dim in (-1, value.dim() - 1)
    return is_last and value.is_floating_point() and value.dtype.itemsize in (2, 4)
