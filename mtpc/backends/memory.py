"""How much device memory a step's intermediates take, read off its graph before it is captured."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from mtpc.capture.effects import Root, analyse
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of

GRANULE = 512
"""Bytes to which torch's allocator rounds up."""


def intermediate_bytes(graph: StepGraph) -> int:
    """The most that temporaries of a flat step take at any one node.

    Values live from the node that makes them to the last that takes them or a view of them, and
    our kernels' scratch memory for the node. A compiler that fuses has fewer of them, so this is
    an upper estimate of what a graph's pool needs, but for what libraries allocate for themselves,
    and for copies of a mutated buffer that a compiler may make where it cannot write in place.
    """
    effects, nodes = analyse(graph.graph), [n for n in graph.graph.nodes if n.op != "output"]
    sizes, last = dict[Root, int](), dict[Root, int]()
    for index, node in enumerate(nodes):
        for root in effects.roots[node] | effects.reads(node):
            last[root] = index
        sizes[node] = _nbytes(_tensors(node)) if node in effects.roots[node] else 0
    ends: dict[int, int] = {}
    live = peak = 0
    with fake_mode_of(graph.graph):
        for index, node in enumerate(nodes):
            live += sizes[node]
            if sizes[node]:
                ends[last[node]] = ends.get(last[node], 0) + sizes[node]
            peak = max(peak, live + _scratch(node))
            live -= ends.pop(index, 0)
    return peak


def _tensors(node: fx.Node) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, node.meta.get("val"))
    return found


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind tensors, each counted once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(math.ceil(size / GRANULE) * GRANULE for size in storages.values())


def _scratch(node: fx.Node) -> int:
    """What an operator of ours allocates for itself, between its launches."""
    if not str(node.target).startswith(("mtpc_triton.", "mtpc_loaded.")):
        return 0
    from mtpc.backends.triton_kernels.plans import node_launches

    given = {t.untyped_storage()._cdata for n in node.all_input_nodes for t in _tensors(n)}
    used = [
        value
        for launch in node_launches(node)
        for value in launch.arguments.values()
        if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given
    ]
    # Its result is among them, and has been counted.
    return max(0, _nbytes(used) - _nbytes(_tensors(node)))
