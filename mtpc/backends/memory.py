"""How much device memory a step's intermediates take, read off its graph before it is captured:
the most that is needed at once, and where each would be in a pool that all steps share."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from mtpc.capture.effects import Root, analyse
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of

GRANULE = 512
"""Bytes to which torch's allocator rounds up."""


@dataclass(frozen=True)
class Live:
    """Memory of a step that nobody else gave it.

    Attributes:
        name: of the node that makes it; scratch memory is its operator's.
        nbytes: as torch's allocator rounds it.
        first: place of the node that makes it.
        last: place of the last node that takes it or a view of it.
    """

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Live) -> bool:
        """Whether both are needed at some node."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Placed:
    """Live memory and where it is in a pool: from `offset` to before `end`."""

    live: Live
    offset: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.live.nbytes


def live_memory(graph: StepGraph) -> list[Live]:
    """Temporaries of a flat step, in the order of their making.

    Values live from the node that makes them to the last that takes them or a view of them, and
    our kernels' scratch memory for the node. A compiler that fuses has fewer of them.
    """
    effects, nodes = analyse(graph.graph), [n for n in graph.graph.nodes if n.op != "output"]
    last: dict[Root, int] = {}
    for index, node in enumerate(nodes):
        for root in effects.roots[node] | effects.reads(node):
            last[root] = index
    found: list[Live] = []
    with fake_mode_of(graph.graph):
        for index, node in enumerate(nodes):
            if node in effects.roots[node] and _tensors(node):
                found.append(Live(node.name, _nbytes(_tensors(node)), index, last[node]))
            scratch = _scratch(node)
            if scratch:
                found.append(Live(f"{node.name} (scratch)", scratch, index, index))
    return found


def peak_bytes(live: Iterable[Live]) -> int:
    """The most that is needed at any one node: an upper estimate of what a graph's pool needs, but
    for what libraries allocate for themselves, and for copies of a mutated buffer that a compiler
    may make where it cannot write in place."""
    changes = Counter[int]()
    for item in live:
        changes[item.first] += item.nbytes
        changes[item.last + 1] -= item.nbytes
    return max(accumulate((changes[index] for index in sorted(changes)), initial=0))


def place_live(live: Iterable[Live]) -> list[Placed]:
    """An offset for each, so that what is needed at one time is apart: the largest first, each in
    the lowest gap that holds it."""
    placed: list[Placed] = []  # By offset.
    for item in sorted(live, key=lambda item: (-item.nbytes, item.first)):
        offset = 0
        for other in placed:
            if not item.meets(other.live):
                continue
            if offset + item.nbytes <= other.offset:
                break
            offset = max(offset, other.end)
        insort(placed, Placed(item, offset), key=lambda other: other.offset)
    return placed


def pool_bytes(placed: Iterable[Placed]) -> int:
    """Where the last of them ends."""
    return max((item.end for item in placed), default=0)


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
