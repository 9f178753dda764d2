"""Device memory of a step's temporaries, computed from its graph before capture.

It gives the largest sum that is live at one time, and an offset for each temporary in a memory pool
that all steps share.
"""

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
"""torch's allocator rounds sizes up to a multiple of this many bytes."""


@dataclass(frozen=True)
class Live:
    """Memory that a step allocates: a temporary value, or scratch memory of an operator.

    Attributes:
        name: name of the node that allocates it.
        nbytes: size, as torch's allocator rounds it.
        first: index of the node that allocates it.
        last: index of the last node that reads it or a view of it.
    """

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Live) -> bool:
        """Whether both are live at the same node."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Placed:
    """Live memory and its place in a pool: bytes `offset` to `end`, the latter excluded."""

    live: Live
    offset: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.live.nbytes


def live_memory(graph: StepGraph) -> list[Live]:
    """Memory that a flat step allocates, in order of execution.

    A value is live from the node that computes it to the last node that reads it or a view of it.
    Scratch memory of mtpc's kernels is live during its node. A compiler that fuses nodes allocates
    less.
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
    """The largest number of bytes that is live at one node.

    It estimates from above what the pool of a captured graph needs. Two things are not in it: what
    libraries allocate themselves, and copies that a compiler makes of a buffer that it cannot
    mutate in place.
    """
    changes = Counter[int]()
    for item in live:
        changes[item.first] += item.nbytes
        changes[item.last + 1] -= item.nbytes
    return max(accumulate((changes[index] for index in sorted(changes)), initial=0))


def place_live(live: Iterable[Live]) -> list[Placed]:
    """Give each an offset, so that memory which is live at the same time does not overlap.

    The largest is placed first, each in the lowest gap that holds it.
    """
    placed: list[Placed] = []  # Sorted by offset.
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
    """Bytes of a pool that holds all of them."""
    return max((item.end for item in placed), default=0)


def _tensors(node: fx.Node) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, node.meta.get("val"))
    return found


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Rounded bytes of the storages of tensors, each storage counted once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(math.ceil(size / GRANULE) * GRANULE for size in storages.values())


def _scratch(node: fx.Node) -> int:
    """Bytes that one of mtpc's GPU operators allocates for use between its launches."""
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
    # `used` includes the result, which `live_memory` counts by itself.
    return max(0, _nbytes(used) - _nbytes(_tensors(node)))
