"""Counts the kernels and copies of a step as Inductor schedules it, without a GPU.

Inductor stops after it has decided what to fuse. It does so for the CPU, by the same scheduler as
for a GPU; there it may split a large kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from mtpc.backends.cuda import compile_flat, cut_step
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError

_MISSED = ("possibly_missed_reinplacing_bytes", "possibly_missed_reinplacing_opportunities")
_NO_KERNEL = ("MultiOutput", "MultiOutputLayout")


@dataclass(frozen=True)
class Lowered:
    """A step as Inductor has scheduled it.

    Attributes:
        generated: kernels that Inductor writes: norms, casts, gathers, copies of views.
        called: kernels of libraries and operators of ours, by name.
        missed: buffers that are copied before an operator writes them, and how many bytes.
        generated_bytes: what the generated kernels read and write.
        largest: bytes of the largest buffer that a generated kernel makes: a copied pool is one.
    """

    generated: int
    called: Counter[str]
    missed: dict[str, int]
    generated_bytes: int
    largest: int

    def with_segments(self, other: Lowered, count: int) -> Lowered:
        """The same with more segments of one kind."""
        return Lowered(
            self.generated + count * other.generated,
            self.called + Counter({name: count * n for name, n in other.called.items()}),
            {name: n + count * other.missed[name] for name, n in self.missed.items()},
            self.generated_bytes + count * other.generated_bytes,
            max(self.largest, other.largest),
        )


class _Scheduled(Exception):
    """Ends Inductor after fusion, because code generation is not needed."""


def lowered(graph: StepGraph) -> Lowered:
    """Let Inductor schedule a flat step that is bound to operators, not to visible Triton kernels.

    Raises:
        BackendError: Inductor ends before it has fused anything.
    """
    step = cut_step(graph)
    whole = Lowered(0, Counter(), dict.fromkeys(_MISSED, 0), 0, 0)
    for form, (module, examples) in enumerate(step.modules()):
        whole = whole.with_segments(_schedule(module, examples, graph.name), step.counts()[form])
    return whole


def _schedule(module: fx.GraphModule, examples: list[Tensor], name: str) -> Lowered:
    found: list[dict[str, Any]] = []

    def stop(nodes: list[Any]) -> None:
        found.append(_look(nodes))
        raise _Scheduled

    counters.clear()
    options: dict[str, Any] = {"_post_fusion_custom_pass": stop, "fx_graph_cache": False}
    try:
        with torch._inductor.config.patch(options):
            compile_flat(module, examples)
    except Exception as error:
        if not found:
            raise BackendError(f"Inductor does not schedule {name}: {error}") from error
    missed = {name: counters["inductor"][name] for name in _MISSED}
    return Lowered(missed=missed, **found[0])


def _look(nodes: list[Any]) -> dict[str, Any]:
    """Collect facts about scheduled nodes, while Inductor's state exists."""
    names = [_name(node) for node in nodes]
    written = [node for node, name in zip(nodes, names, strict=True) if name is None]
    made = [_nbytes(output) for node in written for output in node.get_outputs()]
    return dict(
        generated=len(written),
        called=Counter(name for name in names if name),
        generated_bytes=sum(node.get_read_write_buffers_sizes() for node in written),
        largest=max(made, default=0),
    )


def _nbytes(output: Any) -> int:
    """Bytes of a buffer that a kernel allocates; 0 for an existing buffer that it writes."""
    if output.get_mutations() or output.get_aliases():
        return 0
    layout = output.node.get_layout()
    return int(layout.storage_size()) * int(layout.dtype.itemsize)


def _name(node: Any) -> str | None:
    """What a scheduled node calls; "" if it runs nothing, None for a generated kernel."""
    kind = type(node).__name__
    if kind == "NopKernelSchedulerNode":
        return ""
    if kind != "ExternKernelSchedulerNode":
        return None
    if type(node.node).__name__ in _NO_KERNEL:
        return ""
    return str(getattr(node.node, "op_overload", None) or type(node.node).__name__)
