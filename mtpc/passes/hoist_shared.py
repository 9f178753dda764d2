"""hoist-shared: compute once what the K draft steps and verify compute alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.effects import Effects, Root, analyse
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, Policy, sweep

_IMPURE_TAGS = (torch.Tag.nondeterministic_seeded,)


@dataclass(frozen=True)
class HoistShared:
    """Common-subexpression elimination that knows about mutation.

    Each draft step re-derives the same constants, weight casts and metadata; after fusion they
    sit in one graph. Two calls are the same if operator and arguments are, and no memory that
    they read was written in between. Results that someone mutates are never shared.
    """

    name: ClassVar[str] = "hoist-shared"
    policy: ClassVar[Policy] = "on"

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
    """Hashable identity of a pure call, or None where it must not be shared."""
    if node.op != "call_function" or effects.writes[node] or node in mutated:
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if any(tag in target.tags for tag in _IMPURE_TAGS):
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
    # 1, 1.0 and True are equal and hash alike, as are 0.0 and -0.0, but are different arguments.
    return (type(value), repr(value) if isinstance(value, float) else value)
