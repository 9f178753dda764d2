"""fuse-draft-entry: both norms of an MTP layer's entry and their concatenation are one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import mtpc.ops.fused  # noqa: F401  (registers the op that this pass calls)
from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Policy, emit, is_call, sweep
from mtpc.passes.patterns import operands

_NORM = torch.ops.mtpc.rms_norm.default


@dataclass(frozen=True)
class FuseDraftEntry:
    """Exchange cat(norm of the embedding, norm of the hidden state), in whichever order, for
    `mtpc::draft_entry`, which writes both where the projection reads them.

    Norms are those that fuse-elementwise has found: without it there is nothing to exchange. For
    backends with such a kernel (cuda). Rounding stays where it was.
    """

    name: ClassVar[str] = "fuse-draft-entry"
    policy: ClassVar[Policy] = "off"

    def apply(self, graph: StepGraph) -> int:
        effects = analyse(graph.graph)
        mutated = frozenset[Any]().union(*effects.writes.values())
        rewrites = 0
        for node in list(graph.graph.nodes):
            norms = _match(node)
            # Norms move to the concatenation: nothing may write what they read on the way.
            if norms is None or any(effects.reads(norm) & mutated for norm in norms):
                continue
            left, right = (operands(norm, _NORM, 4) for norm in norms)
            args = (*left[:2], *right)
            with graph.graph.inserting_before(node):
                entry = emit(graph.graph, torch.ops.mtpc.draft_entry.default, args, node)
            node.replace_all_uses_with(entry)
            rewrites += 1
        if rewrites:
            sweep(graph)
        return rewrites


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Two norms that a node puts side by side, if they are alike and nobody else wants them."""
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
