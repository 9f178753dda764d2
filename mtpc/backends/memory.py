"""Device memory of a step's temporaries, computed from its graph before capture.

It gives the largest sum that is live at one time, and an offset for each temporary in a memory pool
that all steps share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from torch import Tensor, fx

from mtpc.backends.placing import Live
from mtpc.backends.triton_kernels import call_launches
from mtpc.capture.effects import Root, analyse, storages
from mtpc.capture.fake_calls import tensors_in
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of

GRANULE = 512
"""torch's allocator rounds sizes up to a multiple of this many bytes."""


def live_memory(graph: StepGraph) -> list[Live]:
    """Memory that a flat step allocates, in order of execution.

    A value is live from the node that computes it to the last node that reads it or a view of it.
    Scratch memory of kernels is live during its node. A compiler that fuses nodes allocates less.
    """
    effects, nodes = analyse(graph.graph), [n for n in graph.graph.nodes if n.op != "output"]
    last: dict[Root, int] = {}
    for index, node in enumerate(nodes):
        for root in effects.roots[node] | effects.reads(node):
            last[root] = index
    found: list[Live] = []
    with fake_mode_of(graph.graph):
        for index, node in enumerate(nodes):
            results = tensors_in(node.meta.get("val"))
            if node in effects.roots[node] and results:
                found.append(Live(node.name, _nbytes(results), index, last[node]))
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


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Rounded bytes of the storages of tensors, each storage counted once."""
    sizes = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(map(_rounded, sizes.values()))


def _rounded(size: int) -> int:
    return math.ceil(size / GRANULE) * GRANULE


def _scratch(node: fx.Node) -> int:
    """Bytes that a GPU operator, mtpc's or aiter's, allocates for use between its launches."""
    from mtpc.backends.aiter import scratch_of  # A start on a CPU needs nothing of it.

    theirs = scratch_of(node)
    if theirs:
        return sum(map(_rounded, theirs))
    launches = call_launches(node)
    if not launches:
        return 0
    given = {storage for n in node.all_input_nodes for storage in storages(n.meta.get("val"))}
    used = [
        value
        for launch in launches
        for value in launch.arguments.values()
        if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given
    ]
    # `used` includes the result, which `live_memory` counts by itself.
    return max(0, _nbytes(used) - _nbytes(tensors_in(node.meta.get("val"))))
