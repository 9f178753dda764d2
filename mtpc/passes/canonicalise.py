"""canonicalise: remove operators that change nothing at these sizes and dtypes, and dead code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from mtpc.capture.effects import eliminate_dead_nodes, storages
from mtpc.capture.graph import StepGraph, first_argument
from mtpc.passes.base import Pass, aten


@dataclass(frozen=True)
class Canonicalise(Pass, policy="on"):
    """Replace identity nodes by their input and erase dead nodes; counts the nodes removed."""

    def apply(self, graph: StepGraph) -> int:
        return drop_identities(graph.graph)


def drop_identities(graph: fx.Graph) -> int:
    """Replace identity nodes and erase dead ones in any flat graph whose nodes have fake values.

    Returns the number of nodes removed.
    """
    removed = 0
    for node in list(graph.nodes):
        rule = _IDENTITIES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        source = first_argument(node)
        before, after = source.meta["val"], node.meta["val"]
        # A copy has memory of its own even if its layout is the same, so it must stay.
        if set(storages(after)) <= set(storages(before)) and rule(before, after):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            removed += 1
    return removed + eliminate_dead_nodes(graph)


def _same_layout(before: Tensor, after: Tensor) -> bool:
    return (
        before.shape == after.shape
        and before.dtype == after.dtype
        and before.stride() == after.stride()
        and before.storage_offset() == after.storage_offset()
    )


def _same_values(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.shape == after.shape


_IDENTITIES: dict[Any, Callable[[Tensor, Tensor], bool]] = {
    aten.to.dtype: _same_layout,
    aten.to.dtype_layout: _same_layout,
    aten.to.device: _same_layout,
    aten.type_as.default: _same_layout,
    aten.contiguous.default: _same_layout,
    aten.slice.Tensor: _same_layout,
    aten.view.default: _same_layout,
    aten.reshape.default: _same_layout,
    aten.expand.default: _same_layout,
    aten.alias.default: _same_values,
    aten.detach.default: _same_values,
    aten.detach_.default: _same_values,
}
