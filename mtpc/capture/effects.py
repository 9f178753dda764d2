"""What each node of a flat step graph reads, writes and aliases.

A *root* identifies memory. It is the name of a buffer or weight (a get_attr target), or the node
that allocated a temporary. A view has the roots of its argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.capture.fake_calls import tensors_in
from mtpc.capture.graph import arguments
from mtpc.layout.specs import is_buffer_name

Root = str | fx.Node


@dataclass(frozen=True)
class Effects:
    """Effects of all nodes of a graph: by node, `roots` of the memory that its value is in, and
    roots of the memory that it `writes`."""

    roots: dict[fx.Node, frozenset[Root]]
    writes: dict[fx.Node, frozenset[Root]]

    def buffer_writes(self, node: fx.Node) -> set[str]:
        """Names of step buffers that a node mutates."""
        return {r for r in self.writes[node] if isinstance(r, str) and is_buffer_name(r)}

    def reads(self, node: fx.Node) -> frozenset[Root]:
        """Roots of all arguments of a node."""
        return frozenset().union(*(self.roots[arg] for arg in node.all_input_nodes))


def analyse(graph: fx.Graph) -> Effects:
    """Compute the effects of every node in one pass over the graph.

    Nodes whose fake values share storage share roots. Schemas do not tell all aliases: `chunk` and
    `split` do not declare their results as views, and `dropout` in inference returns its input.
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
    """Identities of the storages of a node's value, which is a tensor, a tuple of them, or None."""
    if isinstance(value, Tensor):  # Most are: each pass asks a few times for each node.
        return [value.untyped_storage()._cdata]
    return [tensor.untyped_storage()._cdata for tensor in tensors_in(value)]


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node's operator writes, according to its schema."""
    target = node.target
    names = _written_names(target) if isinstance(target, torch._ops.OpOverload) else ()
    if not names:
        return []
    written: list[fx.Node] = []
    values = arguments(node)
    for value in map(values.__getitem__, names):
        listed = value if isinstance(value, (list, tuple)) else [value]
        written += [v for v in listed if isinstance(v, fx.Node)]
    return written


@cache
def _written_names(target: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an operator writes."""
    infos = ((argument.name, argument.alias_info) for argument in target._schema.arguments)
    return tuple(name for name, info in infos if info is not None and info.is_write)


def eliminate_dead_nodes(graph: fx.Graph) -> int:
    """Erase nodes whose result and writes are never read; returns how many.

    A write to memory that outlives the graph always counts as read: to a step buffer, or to an
    input. A write to a temporary counts only if a later live node reads the temporary. Checks of
    values and random draws stay, too.
    """
    effects = analyse(graph)
    live: set[fx.Node] = set()
    live_roots: set[Root] = set()
    for node in reversed(graph.nodes):
        written = effects.writes[node]
        seen = node.op in ("output", "placeholder") or bool(effects.buffer_writes(node))
        seen |= node in live or bool(written & live_roots) or _acts_outside(node, written)
        if seen:
            live.add(node)
            live.update(node.all_input_nodes)
            live_roots |= effects.reads(node)
    dead = [node for node in reversed(graph.nodes) if node not in live]
    for node in dead:
        graph.erase_node(node)
    return len(dead)


def _acts_outside(node: fx.Node, written: frozenset[Root]) -> bool:
    """Whether a node writes an input, or does more than compute its result and write arguments."""
    if any(isinstance(root, fx.Node) and root.op == "placeholder" for root in written):
        return True
    schema = getattr(node.target, "_schema", None)
    return node.is_impure() and not (schema is not None and schema.is_mutable)
