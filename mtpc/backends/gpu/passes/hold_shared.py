"""hold-shared: have Inductor compute once what several of mtpc's operators read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.capture.effects import Root, analyse
from mtpc.capture.graph import StepGraph, operators
from mtpc.passes.base import Pass, emit, is_call

_HELD = torch.ops.aten.as_strided.default


@dataclass(frozen=True)
class HoldShared(Pass, policy="required"):
    """Put a view by strides before the first of several calls that read a computed value.

    Inductor copies an argument that is not in memory, such as a block table, to give it the strides
    that the operator expects, and does so for each call. The view makes it put the value in memory.
    What mtpc's operators write is in memory, and a view would make Inductor copy it before the
    write. Counts the views.
    """

    def apply(self, graph: StepGraph) -> int:
        views = 0
        for read, calls in _shared_reads(graph.graph):
            value: Tensor = read.meta["val"]
            args = (read, list(value.shape), list(value.stride()), 0)
            with graph.graph.inserting_before(calls[0]):
                held = emit(graph.graph, _HELD, args, read)
            for call in calls:
                call.replace_input_with(read, held)
            views += 1
        return views


def _shared_reads(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Computed values, each with several calls that read it with no write in between."""
    effects, versions = analyse(graph), Counter[Root]()
    ours = {n: None for n, target in operators(graph) if target.namespace.startswith("mtpc")}
    in_memory = frozenset().union(*(effects.writes[n] | effects.roots[n] for n in ours))
    readers: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes if node in ours else ():
            roots = effects.roots[read]
            version = tuple(versions[root] for root in roots)
            computed = read.op == "call_function" or any(version)
            if (
                computed
                and not is_call(read, _HELD)
                and not roots & in_memory
                and _is_plain(read.meta.get("val"))
            ):
                readers.setdefault((read, version), []).append(node)
        versions.update(effects.writes[node])
    return [(read, calls) for (read, _), calls in readers.items() if len(calls) > 1]


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that begins where its memory does, without gaps."""
    return isinstance(value, Tensor) and not value.storage_offset() and value.is_contiguous()
