"""fuse-draft-entry: the two norms at the entry of an MTP layer, concatenated by one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Pass, emit, exchange, is_call, operands

_NORM = torch.ops.mtpc.rms_norm.default


@dataclass(frozen=True)
class FuseDraftEntry(Pass, policy="backend"):
    """Replace cat(norm of the embedding, norm of the hidden state) by `mtpc::draft_entry`.

    The operator writes both norms where the projection reads them, in either order, and rounds at
    the same places. The pass looks for the norms that fuse-elementwise emits, and does nothing
    without it. For backends with such a kernel (cuda).
    """

    def apply(self, graph: StepGraph) -> int:
        effects = analyse(graph.graph)
        mutated = frozenset[Any]().union(*effects.writes.values())
        entries = [
            node
            for node in graph.graph.nodes
            # The norms move to the concatenation, so nothing may write what they read.
            if _is_entry(node)
            and not any(effects.reads(norm) & mutated for norm in node.all_input_nodes)
        ]
        return exchange(graph, entries, _entry)


def _entry(graph: StepGraph, node: fx.Node) -> fx.Node:
    left, right = (operands(norm, _NORM, 4) for norm in arguments(node)["tensors"])
    args = (*left[:2], *right)
    return emit(graph.graph, torch.ops.mtpc.draft_entry.default, args, node)


def _is_entry(node: fx.Node) -> bool:
    """Whether a node concatenates two norms that match and that nothing else reads."""
    parts, dim = operands(node, torch.ops.aten.cat.default, 2)
    if parts is None or len(parts) != 2 or not all(is_call(part, _NORM) for part in parts):
        return False
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
    return alike and own and dim in (-1, value.dim() - 1)
