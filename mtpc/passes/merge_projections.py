"""merge-projections: one matrix product for projections of the same input."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit, emit_weight, is_call, refresh_values, sweep
from mtpc.recipes import Join

aten = torch.ops.aten


@dataclass(frozen=True)
class MergeProjections:
    """Concatenate the weights of linears that share an input (q/k/v, gate/up).

    On by default where the backend packs weights (cpu): packed copies are made anyhow, and fewer,
    larger products come nearer to the memory's speed. Elsewhere it would copy weights, for the
    user's model keeps the originals. A merged weight exists once for all buckets.

    Attributes:
        min_group: merge only groups of at least this many linears.
    """

    name: ClassVar[str] = "merge-projections"
    min_group: int = 2

    def apply(self, graph: StepGraph) -> int:
        groups: dict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
        for node in graph.graph.nodes:
            if is_call(node, aten.linear.default) and _weights_are_attributes(node):
                groups[node.args[0], _bias(node) is not None].append(node)
        merged = [group for group in groups.values() if len(group) >= self.min_group]
        for group in merged:
            _merge(graph, group)
        sweep(graph)
        refresh_values(graph)
        return len(merged)


def _bias(node: fx.Node) -> fx.Node | None:
    return node.args[2] if len(node.args) > 2 else None  # type: ignore[return-value]


def _weights_are_attributes(node: fx.Node) -> bool:
    operands = [node.args[1], _bias(node)]
    return all(o is None or o.op == "get_attr" for o in operands)  # type: ignore[union-attr]


def _merge(graph: StepGraph, group: list[fx.Node]) -> None:
    first = group[0]
    with graph.graph.inserting_before(first):
        weight = _concatenated(graph, [n.args[1] for n in group], first)  # type: ignore[misc]
        operands = [first.args[0], weight]
        if _bias(first) is not None:
            operands.append(_concatenated(graph, [_bias(n) for n in group], first))  # type: ignore[misc]
        joint = emit(graph.graph, aten.linear.default, tuple(operands), first)
        start = 0
        for node in group:
            end = start + node.meta["val"].shape[-1]
            part = emit(graph.graph, aten.slice.Tensor, (joint, -1, start, end), node)
            node.replace_all_uses_with(part)
            start = end
    for node in group:
        graph.graph.erase_node(node)


def _concatenated(graph: StepGraph, parts: list[fx.Node], like: fx.Node) -> fx.Node:
    """get_attr of the parts' concatenation, made once per program."""
    name = "merged." + "+".join(str(p.target).replace(".", "_") for p in parts)
    return emit_weight(graph, name, Join("cat", tuple(str(p.target) for p in parts)), like)
