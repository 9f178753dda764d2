"""lower-choices: how routers and greedy heads choose, by operators with kernels for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.gpu.ops.largest import LEAST_ROW_MAX, TOPK_COUNT, TOPK_WIDTH
from mtpc.capture.effects import Effects, analyse
from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import GETITEM, Pass, aten, cast, emit, exchange, is_call, operands, sweep


@dataclass(frozen=True)
class LowerChoices(Pass, policy="backend"):
    """Replace ATen's choices of the largest numbers of a row by operators that GPUs run faster.

    A router's `topk` becomes `mtpc::topk`: ATen's kernels for it are made for long rows, and take
    several launches. Of equal numbers ATen may choose any, and the operator chooses the first.
    Wider rows, and longer choices, stay ATen's. A choice within the best groups of experts
    (DeepSeek-V3's, three of `topk` and a mask) becomes `mtpc::group_topk`; where all groups are the
    best, one `topk` is left.

    The largest of a row of logits becomes `mtpc::row_max`, which has many programs for a row.
    Inductor has one, and for short rows it stays Inductor's. On by default on GPUs.
    """

    def apply(self, graph: StepGraph) -> int:
        effects = analyse(graph.graph)
        grouped = sum(_lower_groups(graph.graph, node, effects) for node in list(graph.graph.nodes))
        sweep(graph, grouped)
        choices = [node for node in graph.graph.nodes if _match_topk(node)[0] is not None]
        maxima = [node for node in graph.graph.nodes if _is_wide_max(node)]
        return grouped + exchange(graph, choices, _topk) + exchange(graph, maxima, _row_max)


def _lower_groups(graph: fx.Graph, node: fx.Node, effects: Effects) -> bool:
    """Replace a topk among the groups that a choice of groups keeps; returns whether it did."""
    masked, count = _match_topk(node)
    x, totals, kept, fill = _match_mask(masked)
    if x is None or not _are_totals(totals, x):
        return False
    # The new operator reads x after the groups were chosen, so nothing may write x.
    if effects.roots[x] & frozenset[Any]().union(*effects.writes.values()):
        return False
    groups = totals.meta["val"].shape[-1]
    if kept == groups:  # The mask hides nothing.
        node.replace_input_with(masked, x)
        return True
    if fill != float("-inf") or x.meta["val"].dtype != torch.float32:
        return False
    args = (x, count, groups, kept)
    with graph.inserting_before(node):
        node.replace_all_uses_with(emit(graph, torch.ops.mtpc.group_topk.default, args, node))
    return True


def _match_topk(node: Any) -> tuple[Any, int]:
    """(numbers, count) of a topk of narrow rows; (None, 0) of any other node."""
    given = arguments(node) if is_call(node, aten.topk.default) else {}
    x, count = given.get("self"), given.get("k", 0)
    fits = (
        x is not None
        and given["largest"]
        and _chooses_in_rows(x, given["dim"])
        and x.meta["val"].shape[-1] <= TOPK_WIDTH
        and 0 < count <= TOPK_COUNT
    )
    return (x, count) if fits else (None, 0)


def _match_mask(node: Any) -> tuple[Any, Any, int, Any]:
    """(x, totals, kept, fill) if a node is x [T, N] with `fill` in all groups but the `kept` ones
    with the largest totals [T, groups]."""
    none = (None, None, 0, None)
    x, hidden, fill = operands(node, aten.masked_fill.Scalar, 3)
    (shown,) = operands(hidden, aten.bitwise_not.default, 1)
    repeated, _ = operands(cast(shown), aten.reshape.default, 2)
    column, _ = operands(repeated, aten.expand.default, 2)
    marks, last = operands(column, aten.unsqueeze.default, 2)
    zeros, dim, places, one = operands(marks, aten.scatter_.value, 4)
    if not is_call(zeros, aten.zeros_like.default) or list(zeros.users) != [marks]:
        return none
    if not is_call(places, GETITEM) or places.args[1] != 1:
        return none
    totals, kept = _match_topk(places.args[0])
    value, shape = x.meta["val"], tuple(zeros.meta["val"].shape)
    is_mask = (
        totals is not None
        and len(shape) == value.dim() == 2
        and tuple(totals.meta["val"].shape) == shape
        and (dim % 2, last, one) == (1, -1, 1)
        and tuple(repeated.meta["val"].shape) == (*shape, value.shape[1] // shape[1])
        and tuple(cast(shown).meta["val"].shape) == tuple(value.shape)
        and shown.meta["val"].dtype == torch.bool
    )
    return (x, totals, kept, fill) if is_mask else none


def _are_totals(totals: fx.Node, x: fx.Node) -> bool:
    """Whether totals [T, groups] are the sums of the two largest numbers of each group of x."""
    pairs, over = operands(totals, aten.sum.dim_IntList, 2)
    if over != [-1] or not is_call(pairs, GETITEM) or pairs.args[1] != 0:
        return False
    grouped, count = _match_topk(pairs.args[0])
    source, _ = operands(grouped, aten.view.default, 2)
    shape = tuple(totals.meta["val"].shape)
    return source is x and count == 2 and tuple(grouped.meta["val"].shape[:2]) == shape


def _topk(graph: StepGraph, node: fx.Node) -> fx.Node:
    return emit(graph.graph, torch.ops.mtpc.topk.default, _match_topk(node), node)


def _is_wide_max(node: fx.Node) -> bool:
    """Whether a node is the maximum of wide rows, or its index."""
    if not is_call(node, aten.max.dim, aten.argmax.default):
        return False
    x, dim = operands(node, node.target, 2)
    return x is not None and _chooses_in_rows(x, dim) and x.meta["val"].shape[-1] >= LEAST_ROW_MAX


def _row_max(graph: StepGraph, node: fx.Node) -> fx.Node:
    both = emit(graph.graph, torch.ops.mtpc.row_max.default, (arguments(node)["self"],), node)
    is_index = is_call(node, aten.argmax.default)
    return emit(graph.graph, GETITEM, (both, 1), node) if is_index else both


def _chooses_in_rows(x: fx.Node, dim: Any) -> bool:
    """Whether a choice is among floats of at most 32 bits of the last dimension."""
    value: Tensor = x.meta["val"]
    is_last = value.dim() > 0 and dim in (-1, value.dim() - 1)
    return is_last and value.is_floating_point() and value.dtype.itemsize in (2, 4)
