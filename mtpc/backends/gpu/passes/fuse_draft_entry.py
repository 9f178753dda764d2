"""fuse-draft-entry: the two norms at the entry of an MTP layer, concatenated by one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Policy, emit, is_call, operands, sweep

_NORM = torch.ops.mtpc.rms_norm.default


@dataclass(frozen=True)
class FuseDraftEntry:
    """Replace cat(norm of the embedding, norm of the hidden state) by `mtpc::draft_entry`.

    The operator writes both norms where the projection reads them, in either order, and rounds at
    the same places. The pass looks for the norms that fuse-elementwise emits, and does nothing
    without it. For backends with such a kernel (cuda).
    """

    name: ClassVar[str] = "fuse-draft-entry"
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        effects = analyse(graph.graph)
        mutated = frozenset[Any]().union(*effects.writes.values())
        rewrites = 0
        for node in list(graph.graph.nodes):
            norms = _match(node)
            # The norms move to the concatenation, so nothing may write what they read.
            if norms is None or any(effects.reads(norm) & mutated for norm in norms):
                continue
            left, right = (operands(norm, _NORM, 4) for norm in norms)
            args = (*left[:2], *right)
            with graph.graph.inserting_before(node):
                entry = emit(graph.graph, torch.ops.mtpc.draft_entry.default, args, node)
            node.replace_all_uses_with(entry)
            rewrites += 1
        return sweep(graph, rewrites)


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two norms that a node concatenates, if they match and nothing else reads them."""
    parts, dim = operands(node, torch.ops.aten.cat.default, 2)
    if parts is None or len(parts) != 2 or not all(is_call(part, _NORM) for part in parts):
        return None
    left, right = parts
    value = left.meta["val"]
    (_, weight, *options), (_, _, *others) = (operands(part, _NORM, 4) for part in parts)
    alike = (
        value.shape == right.meta["val"].shape
        and value.dtype == right.meta["val"].dtype
        and weight is not None
        and options == others
    )
    own = all(list(part.users) == [node] for part in parts)
    return (left, right) if alike and own and dim in (-1, value.dim() - 1) else None
