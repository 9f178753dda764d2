"""resize-metadata: grow metadata buffers from one row per request to one row per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.layout.buffers import R, T
from mtpc.passes.base import Pass, aten

_OPEN_END = 2**62
"""A slice without an end is traced with a larger integer than this."""


@dataclass(frozen=True)
class ResizeMetadata(Pass, policy="required"):
    """Resize the metadata buffers that a step with several tokens per request overruns.

    Plain decoding has one token per request, so `positions` and `slot_mapping` are declared [R]. A
    verify step uses R*Q rows of them. If such a buffer is too short, a slice of it is clamped
    without an error, and KV is lost; captured graphs with `slot_mapping[:bs]` instead of
    `slot_mapping[:bs * max_qlen]` have had this fault. The pass reads from the graph how many rows
    are used. If necessary, it replaces the size R by R*Q, or a larger multiple of R, and
    reallocates the buffer. The verifier checks the sizes again.
    """

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for name, demand in row_demands(graph).items():
            spec, rows = graph.layout[name], graph.layout.shape(name)[0]
            if demand > rows and spec.dims[0] == R:
                # True chaining adds earlier rows to R*Q, the same number for each request.
                excess = max(demand - graph.layout.value(T), 0)
                size = T + R * -(-excess // graph.layout.value(R))
                graph.resize(name, graph.layout.resized(name, (size, *spec.dims[1:])))
                rewrites += 1
        return rewrites


def row_demands(graph: StepGraph) -> dict[str, int]:
    """Buffer name -> the number of rows that slices use, for each batch buffer."""
    demands: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.target is not aten.slice.Tensor:
            continue
        x, dim, _, end, _ = arguments(node).values()
        name = str(x.target) if isinstance(x, fx.Node) and x.op == "get_attr" else ""
        is_first = name.startswith("batch.") and dim == 0 and end is not None
        if is_first and int(end) < _OPEN_END:
            demands[name] = max(demands.get(name, 0), int(end))
    return demands
