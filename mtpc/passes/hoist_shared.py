"""hoist-shared: compute once what verification and the K draft steps have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.effects import Effects, Root, analyse
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, Pass, sweep


@dataclass(frozen=True)
class HoistShared(Pass, policy="on"):
    """Common-subexpression elimination that respects mutation.

    Each draft step computes the same constants, weight casts and metadata again. After
    fuse-draft-chain they are all in one graph. Two calls are equal if they have the same operator
    and arguments, and if nothing in between writes memory that they read. The pass never shares a
    result that is mutated.
    """

    def apply(self, graph: StepGraph) -> int:
        effects = analyse(graph.graph)
        mutated = frozenset().union(*effects.writes.values())
        versions: Counter[Root] = Counter()
        seen: dict[Any, fx.Node] = {}
        replaced: dict[fx.Node, fx.Node] = {}
        for node in list(graph.graph.nodes):
            key = _key(node, effects, mutated, versions)
            versions.update(effects.writes[node])
            if key is None:
                continue
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                replaced[node] = first
        for node in reversed(replaced):
            graph.graph.erase_node(node)
        sweep(graph)
        return len(replaced)


def _key(
    node: fx.Node, effects: Effects, mutated: frozenset[Any], versions: Counter[Root]
) -> Any | None:
    """A hashable key of a pure call, or None if the call must not be shared."""
    if node.op != "call_function" or effects.writes[node] or node in mutated:
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
    elif target is not GETITEM:
        return None
    roots = sorted((str(root), versions[root]) for root in effects.reads(node))
    return target, _freeze(node.args), _freeze(node.kwargs), tuple(roots)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in value.items()))
    # 1, 1.0 and True are equal and have the same hash, as do 0.0 and -0.0, but they differ.
    return (type(value), repr(value) if isinstance(value, float) else value)
