"""select-head-rows: compute logits, and whatever leads to them, only for the rows that are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from mtpc.capture.effects import Effects, analyse
from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.traits import traits_of
from mtpc.passes.base import Pass, aten, emit, emit_named, operands, refresh_values, sweep

_ELEMENTWISE = ("broadcast", "cast", "same")
_FIRST_ARGUMENT_ONLY = ("linear", "reduce", "drop")
"""Row-wise in the first argument; the others are weights or numbers."""


@dataclass(frozen=True)
class SelectHeadRows(Pass, policy="on"):
    """Move `index_select(f(x), rows)` to `f(index_select(x, rows))` through row-wise f.

    Prefill needs logits of one row per request, and the draft layer's first step those of the
    anchor row. Both are written as a head, then a selection. Where all users of a row-wise node
    select the same rows, the selection moves above it: through the head (the largest matrix of the
    model), the final norm, and the last block's feed-forward, up to attention.
    """

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
    selections = [operands(user, aten.index_select.default, 3) for user in node.users]
    if not all(x is node for x, _, _ in selections):
        return None
    rank = node.meta["val"].dim()
    found = {(rows, dim % rank - rank) for _, dim, rows in selections}
    if len(found) != 1:
        return None
    rows, dim = found.pop()
    # One row stands in no operand that could be selected from: it may as well be broadcast.
    is_single, count = node.meta["val"].shape[dim] == 1, rows.meta["val"].shape[0]
    return None if is_single and count != 1 else (rows, dim)


def _row_wise(node: fx.Node, dim: int, effects: Effects, mutated: frozenset[Any]) -> bool:
    """Whether row t of the result depends on row t of the operands only, and nothing is mutated."""
    if (effects.reads(node) | effects.roots[node]) & mutated:
        return False
    dims = traits_of(node.target).dims
    if dims == "reduce":
        values = arguments(node)
        over = values["dim"] or ()
        return bool(values["keepdim"] and over) and all(d < 0 and d != dim for d in over)
    if dims == "drop":
        # It removes a leading dim: dims counted from the right stay what they are.
        return bool(arguments(node)["dim"] == 0 and -dim <= node.meta["val"].dim())
    return dim < -1 if dims == "linear" else dims in _ELEMENTWISE


def _push_up(node: fx.Node, rows: fx.Node, dim: int) -> None:
    """Select the operands' rows, recompute `node` on them, replace all its selects."""
    graph, size = node.graph, node.meta["val"].shape[dim]
    selects = list(node.users)
    first = next(n for n in graph.nodes if n in node.users)
    values, dims = arguments(node), traits_of(node.target).dims
    row_wise = list(values)[:1] if dims in _FIRST_ARGUMENT_ONLY else list(values)
    with graph.inserting_before(first):
        for name in row_wise:
            if _has_rows(values[name], dim, size):
                place = values[name].meta["val"].dim() + dim
                args = (values[name], place, rows)
                values[name] = emit(graph, aten.index_select.default, args, node)
        new = emit_named(graph, node.target, values, node)
    for select in selects:
        select.replace_all_uses_with(new)
        graph.erase_node(select)
    graph.erase_node(node)


def _has_rows(argument: Any, dim: int, size: int) -> bool:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() < -dim:
        return False
    return bool(value.shape[dim] == size and size > 1)
