"""What each node of a flat step graph reads, writes and aliases.

A *root* is where memory comes from: a buffer or weight (its get_attr target, a string) or the
node that allocated a temporary. Views share their argument's roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from mtpc.capture.graph import arguments, is_buffer_name

Root = str | fx.Node


@dataclass(frozen=True)
class Effects:
    """Roots per node: `roots` it aliases, `writes` it mutates."""

    roots: dict[fx.Node, frozenset[Root]]
    writes: dict[fx.Node, frozenset[Root]]

    def buffer_writes(self, node: fx.Node) -> set[str]:
        """Names of step buffers that a node mutates."""
        return {r for r in self.writes[node] if isinstance(r, str) and is_buffer_name(r)}

    def reads(self, node: fx.Node) -> frozenset[Root]:
        """Roots of everything a node takes in."""
        return frozenset().union(*(self.roots[arg] for arg in node.all_input_nodes))


def analyse(graph: fx.Graph) -> Effects:
    """Effects of every node, in one pass over the graph.

    What aliases what is read off the fake values: two nodes whose tensors share storage share
    roots. Schemas would be wrong here: `chunk` and `split` do not say that their results are
    views, and `dropout` outside training returns its very input.
    """
    owners: dict[int, Root] = {}
    roots: dict[fx.Node, frozenset[Root]] = {}
    writes: dict[fx.Node, frozenset[Root]] = {}
    for node in graph.nodes:
        writes[node] = frozenset().union(*(roots[arg] for arg in _written_arguments(node)))
        owner: Root = str(node.target) if node.op == "get_attr" else node
        roots[node] = frozenset(owners.setdefault(s, owner) for s in storages(node.meta.get("val")))
    return Effects(roots, writes)


def storages(value: Any) -> list[int]:
    """Identities of the memory behind a node's value: a tensor, a tuple of them, or nothing."""
    found: list[int] = []
    tree_map_only(Tensor, lambda t: found.append(t.untyped_storage()._cdata), value)
    return found


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """Argument nodes that the node's operator writes, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    values = arguments(node)
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = values[argument.name]
            listed = value if isinstance(value, (list, tuple)) else [value]
            written += [v for v in listed if isinstance(v, fx.Node)]
    return written


def eliminate_dead_nodes(graph: fx.Graph) -> int:
    """Erase nodes whose result and effects nobody sees; returns how many.

    A write to a step buffer is always seen. A write to a temporary is seen only if a live node
    later reads that temporary.
    """
    effects = analyse(graph)
    live: set[fx.Node] = set()
    live_roots: set[Root] = set()
    for node in reversed(graph.nodes):
        written = effects.writes[node]
        seen = node.op in ("output", "placeholder") or bool(effects.buffer_writes(node))
        seen |= node in live or bool(written & live_roots)
        if seen:
            live.add(node)
            live.update(node.all_input_nodes)
            live_roots |= effects.reads(node)
    dead = [node for node in reversed(graph.nodes) if node not in live]
    for node in dead:
        graph.erase_node(node)
    return len(dead)
