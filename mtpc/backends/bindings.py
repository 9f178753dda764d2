"""Binding `mtpc::` ops to kernels: per op the candidates in order, each with its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mtpc.backends.base import Report
from mtpc.capture.graph import StepGraph
from mtpc.ops.signatures import arguments_of

Limits = Callable[[fx.Node, StepGraph], str | None]
"""Why a kernel cannot take a call, or None where it can; decided from shapes and dtypes."""


Configure = Callable[[fx.Node, StepGraph], tuple[str, tuple[str, ...]]]
"""A kernel's argument `configs` for a call, "" for its default; and notes on the choice."""


def by_default(node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
    """What is taken where nothing was measured."""
    return "", ()


@dataclass(frozen=True)
class Binding:
    """A kernel that may stand in for a reference op.

    Attributes:
        library: whose it is, for notes: "triton", "aiter".
        reference: `mtpc::` overload.
        target: overload of the same arguments and meaning.
        refuses: its limits.
        expected: leave a note where it is refused: somebody would want to know.
        configure: chooses how the kernel is run; only kernels with an argument `configs` have more
            than the default.
    """

    library: str
    reference: Any
    target: Any
    refuses: Limits
    expected: bool = True
    configure: Configure = by_default


@dataclass(frozen=True)
class BindKernels:
    """legalise-gpu: each reference op becomes the first kernel whose limits hold the call.

    Where none does, the reference stays: it runs anywhere, slowly. Every refusal is noted.
    """

    bindings: Sequence[Binding]
    note: Report = field(default=lambda line: None)
    name: ClassVar[str] = "legalise-gpu"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in graph.graph.nodes:
            if node.op != "call_function" or not str(node.target).startswith("mtpc."):
                continue
            chosen = self._choose(node, graph)
            if chosen is not None:
                configs, lines = chosen.configure(node, graph)
                for line in lines:
                    self.note(line)
                node.target = chosen.target
                if configs:
                    node.kwargs = {**node.kwargs, "configs": configs}
                rewrites += 1
        return rewrites

    def _choose(self, node: fx.Node, graph: StepGraph) -> Binding | None:
        name = str(node.target).removesuffix(".default").replace(".", "::")
        candidates = [b for b in self.bindings if b.reference is node.target]
        for index, binding in enumerate(candidates):
            reason = _refused_argument(node, binding.target) or binding.refuses(node, graph)
            if reason is None:
                return binding
            if binding.expected:
                rest = [b.library for b in candidates[index + 1 :]]
                instead = rest[0] if rest else "the PyTorch reference, which is slow"
                self.note(f"{name} does not run on {binding.library} ({reason}): {instead}")
        if not candidates:
            self.note(f"{name} has no GPU kernel: the PyTorch reference, which is slow")
        return None


def _refused_argument(node: fx.Node, target: Any) -> str | None:
    """Arguments that the reference has and a kernel has not: a number of rows, which only the cpu's
    kernels take, if somebody enables skip-idle-rows here."""
    taken = {argument.name for argument in target._schema.arguments}
    refused = [name for name in arguments_of(node) if name not in taken]
    return f"it takes no {', '.join(refused)}" if refused else None
