"""What each node of a flat step graph may read, write and alias, from the ops' own schemas.

A *root* is where memory comes from: a buffer or weight (its get_attr target, a string) or the
node that allocated a temporary. Views share their argument's roots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from mtpc.capture.graph import is_buffer_name

Root = str | fx.Node


@dataclass(frozen=True)
class Effects:
    """Roots per node: `roots` it may alias, `writes` it mutates."""

    roots: dict[fx.Node, frozenset[Root]]
    writes: dict[fx.Node, frozenset[Root]]

    def buffer_writes(self, node: fx.Node) -> set[str]:
        """Names of step buffers that a node mutates."""
        return {r for r in self.writes[node] if isinstance(r, str) and is_buffer_name(r)}

    def reads(self, node: fx.Node) -> frozenset[Root]:
        """Roots of everything a node takes in."""
        return frozenset().union(*(self.roots[arg] for arg in node.all_input_nodes))


def analyse(graph: fx.Graph) -> Effects:
    """Effects of every node, in one pass over the graph."""
    roots: dict[fx.Node, frozenset[Root]] = {}
    writes: dict[fx.Node, frozenset[Root]] = {}
    for node in graph.nodes:
        written, aliased = _schema_aliases(node)
        writes[node] = frozenset().union(*(roots[arg] for arg in written))
        if node.op == "get_attr":
            roots[node] = frozenset([str(node.target)])
        elif node.op == "output":
            roots[node] = frozenset()
        else:
            shared: frozenset[Root] = frozenset().union(*(roots[arg] for arg in aliased))
            # An op that may or may not return a view (reshape, contiguous) is taken as both.
            own: frozenset[Root] = (
                frozenset() if shared and not _may_copy(node) else frozenset([node])
            )
            roots[node] = shared | own
    return Effects(roots, writes)


_MAYBE_VIEWS = ("reshape", "contiguous", "to", "flatten", "_to_copy")


def _may_copy(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload) and target.overloadpacket.__name__ in _MAYBE_VIEWS
    )


def _schema_aliases(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Argument nodes that the node's operator writes, and those its result may alias."""
    if not isinstance(node.target, torch._ops.OpOverload):
        # getitem on a tuple result aliases whatever the tuple's producer made.
        return [], list(node.all_input_nodes) if node.op == "call_function" else []
    schema = node.target._schema
    returned = {
        alias for ret in schema.returns if ret.alias_info for alias in ret.alias_info.before_set
    }
    written: list[fx.Node] = []
    aliased: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        nodes = [
            v
            for v in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(v, fx.Node)
        ]
        if argument.alias_info.is_write:
            written += nodes
        if argument.alias_info.before_set & returned:
            aliased += nodes
    return written, aliased


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
