"""resize-metadata: grow metadata buffers from one row a request to one row a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.layout.buffers import R, T

aten = torch.ops.aten

_OPEN_END = 2**62
"""Slices without an end are traced with the largest integer: they take what there is."""


@dataclass(frozen=True)
class ResizeMetadata:
    """Resize what a multi-token step overruns.

    A plain decode has one token a request, so `positions` and `slot_mapping` are declared [R].
    A verify step touches R*Q rows of them. A buffer captured too short is a public classic
    (`slot_mapping[:bs]` where bs*max_qlen is needed: KV silently dropped), because a slice past
    the end is silently clamped. This pass reads every row demand off the graph, replaces the
    symbol R by R*Q (or more, a multiple of R) where the demand needs it, and reallocates; the
    verifier checks all demands.
    """

    name: ClassVar[str] = "resize-metadata"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for name, demand in row_demands(graph).items():
            spec, rows = graph.layout[name], graph.layout.shape(name)[0]
            if demand > rows and spec.dims[0] == R:
                # Beyond R*Q there are the earlier rows of true chaining, as many per request.
                excess = max(demand - graph.layout.value(T), 0)
                size = T + R * -(-excess // graph.layout.value(R))
                graph.resize(name, graph.layout.resized(name, (size, *spec.dims[1:])))
                rewrites += 1
        return rewrites


def row_demands(graph: StepGraph) -> dict[str, int]:
    """Rows of each batch buffer that some slice of it reads or writes, by buffer name."""
    demands: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.target is not aten.slice.Tensor or not _is_batch_buffer(node.args[0]):
            continue
        name, (dim, _, end) = str(node.args[0].target), (*node.args[1:4], 0, None, None)[:3]
        if dim == 0 and end is not None and int(end) < _OPEN_END:
            demands[name] = max(demands.get(name, 0), int(end))
    return demands


def _is_batch_buffer(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "get_attr"
        and str(node.target).startswith("batch.")
    )
