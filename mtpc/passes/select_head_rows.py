"""select-head-rows: compute logits, and whatever leads to them, only for the rows that are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mtpc.capture.effects import Effects, analyse
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit, is_call, refresh_values, sweep

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.add.Scalar,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.silu.default,
    aten.sigmoid.default,
    aten.to.dtype,
    aten.type_as.default,
    aten.neg.default,
    aten.clamp.default,
}
_FIRST_ARGUMENT_ONLY = {aten.linear.default}
"""Row-wise in the first argument; the others are weights."""


@dataclass(frozen=True)
class SelectHeadRows:
    """Move `index_select(f(x), rows)` to `f(index_select(x, rows))` through row-wise f.

    Prefill needs logits of one row a request, the draft layer's first step those of the anchor
    row; both are written as head-then-select. Where all users of a row-wise node select the same
    rows, the selection moves above it: through the head (the largest matrix of the model), the
    final norm, and the last block's feed-forward, up to attention.
    """

    name: ClassVar[str] = "select-head-rows"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        effects = analyse(graph.graph)
        mutated = frozenset().union(*effects.writes.values())
        for node in reversed(list(graph.graph.nodes)):
            selection = _common_selection(node)
            if selection is None or not _row_wise(node, selection[1], effects, mutated):
                continue
            _push_up(node, *selection)
            rewrites += 1
        sweep(graph)
        refresh_values(graph)
        return rewrites


def _common_selection(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(rows, dim from the right) if every user of `node` is that one index_select."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor) or not node.users:
        return None
    if not all(is_call(u, aten.index_select.default) and u.args[0] is node for u in node.users):
        return None
    rank = node.meta["val"].dim()
    selections: list[Any] = [user.args for user in node.users]
    found = {(rows, dim % rank - rank) for _, dim, rows in selections}
    return found.pop() if len(found) == 1 else None


def _row_wise(node: fx.Node, dim: int, effects: Effects, mutated: frozenset[Any]) -> bool:
    """Whether row t of the result depends on row t of the operands only, and nothing is mutated."""
    if (effects.reads(node) | effects.roots[node]) & mutated:
        return False
    args: tuple[Any, ...] = node.args
    if is_call(node, aten.mean.dim):
        keeps = len(args) > 2 and bool(args[2])
        return keeps and all(d < 0 and d != dim for d in args[1])
    if is_call(node, aten.select.int):
        return _select_keeps_rows(node, dim)
    if is_call(node, *_FIRST_ARGUMENT_ONLY):
        return dim < -1
    return is_call(node, *_ELEMENTWISE)


def _select_keeps_rows(node: fx.Node, dim: int) -> bool:
    """select(x, 0, i) removes a leading dim: dims counted from the right stay what they are."""
    return bool(node.args[1] == 0 and -dim <= node.meta["val"].dim())


def _push_up(node: fx.Node, rows: fx.Node, dim: int) -> None:
    """Select the operands' rows, recompute `node` on them, replace all its selects."""
    graph, size = node.graph, node.meta["val"].shape[dim]
    selects = list(node.users)
    first = next(n for n in graph.nodes if n in node.users)
    operands: tuple[Any, ...] = node.args
    if is_call(node, *_FIRST_ARGUMENT_ONLY, aten.select.int):
        operands = operands[:1]
    with graph.inserting_before(first):
        args = [
            _select(graph, a, rows, dim, node) if _has_rows(a, dim, size) else a for a in operands
        ]
        new = emit(graph, node.target, (*args, *node.args[len(operands) :]), node)
    for select in selects:
        select.replace_all_uses_with(new)
        graph.erase_node(select)
    graph.erase_node(node)


def _has_rows(argument: Any, dim: int, size: int) -> bool:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() < -dim:
        return False
    return bool(value.shape[dim] == size and size > 1)


def _select(graph: fx.Graph, operand: fx.Node, rows: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    positive = operand.meta["val"].dim() + dim
    return emit(graph, aten.index_select.default, (operand, positive, rows), like)
