"""Binding `mtpc::` ops to kernels: each op has candidates in order, each with its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.collectives import is_collective
from mtpc.ops.signatures import arguments_of
from mtpc.passes.base import Policy
from mtpc.passes.hoist_shared import HoistShared

Limits = Callable[[fx.Node, StepGraph], str | None]
"""(call, graph) -> why a kernel cannot take the call, by shapes and dtypes; None if it can."""
Configure = Callable[[fx.Node, StepGraph], tuple[str, tuple[str, ...]]]
"""(call, graph) -> the kernel's argument `configs` ("" for its default), and notes on it."""
Complete = Callable[[fx.Node, StepGraph], dict[str, Any]]
"""(call, graph) -> arguments of the kernel that the reference does not have, by name. It may emit
calls that compute them; `BindKernels` merges equal calls."""


def by_default(node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
    """Choose the kernel's default configuration."""
    return "", ()


def as_it_is(node: fx.Node, graph: StepGraph) -> dict[str, Any]:
    """Give no further arguments: the kernel takes those of its reference."""
    return {}


_REFERENCE = "the slow PyTorch reference"


@dataclass(frozen=True)
class Binding:
    """A kernel that may replace a reference op.

    Attributes:
        library: where the kernel is from, for notes: "triton", "aiter".
        reference: the reference op, an `mtpc::` overload.
        target: the kernel, an overload with the same arguments and meaning.
        refuses: its limits.
        expected: whether a refusal is noted.
        configure: chooses the kernel's configuration, if it has an argument `configs`.
        complete: gives the arguments that the reference does not have.
    """

    library: str
    reference: Any
    target: Any
    refuses: Limits
    expected: bool = True
    configure: Configure = by_default
    complete: Complete = as_it_is


@dataclass(frozen=True)
class BindKernels:
    """legalise-gpu: replace each reference op by the first kernel that can take the call.

    If none can, the reference op stays. It runs on any device, slowly. Refusals are noted.

    Attributes:
        bindings: the candidates, in order of preference.
        note: is called with each note.
    """

    bindings: Sequence[Binding]
    note: Callable[[str], None] = field(default=lambda line: None)
    name: ClassVar[str] = "legalise-gpu"
    policy: ClassVar[Policy] = "required"

    def apply(self, graph: StepGraph) -> int:
        rewrites, completed = 0, False
        for node in graph.graph.nodes:
            if node.op != "call_function" or not str(node.target).startswith("mtpc."):
                continue
            chosen = self._choose(node, graph)
            if chosen is not None:
                configs, lines = chosen.configure(node, graph)
                with graph.graph.inserting_before(node):
                    added = chosen.complete(node, graph)
                if added:
                    taken = [argument.name for argument in chosen.target._schema.arguments]
                    given = {**arguments(node), **added}
                    node.args, node.kwargs = tuple(given[name] for name in taken), {}
                    completed = True
                for line in lines:
                    self.note(line)
                node.target = chosen.target
                if configs:
                    node.kwargs = {**node.kwargs, "configs": configs}
                rewrites += 1
        if completed:
            HoistShared().apply(graph)
        return rewrites

    def _choose(self, node: fx.Node, graph: StepGraph) -> Binding | None:
        name = str(node.target).removesuffix(".default").replace(".", "::")
        candidates = [b for b in self.bindings if b.reference is node.target]
        # References of these are torch.distributed's, and good for what no kernel can take.
        is_quiet = is_collective(node.target)
        for index, binding in enumerate(candidates):
            reason = _refused_argument(node, binding.target) or binding.refuses(node, graph)
            if reason is None:
                return binding
            if binding.expected and not is_quiet:
                rest = [b.library for b in candidates[index + 1 :]]
                other = rest[0] if rest else _REFERENCE
                self.note(f"{name} does not run on {binding.library} ({reason}): {other} instead")
        if not candidates and not is_quiet:
            self.note(f"{name} has no GPU kernel: {_REFERENCE} instead")
        return None


def _refused_argument(node: fx.Node, target: Any) -> str | None:
    """Optional arguments of a call that the kernel lacks, such as that of skip-idle-rows."""
    taken = {argument.name for argument in target._schema.arguments}
    call, reference = arguments_of(node), cast(Any, node.target)
    refused = [
        argument.name
        for argument in reference._schema.arguments
        if argument.name in call
        and argument.name not in taken
        and argument.has_default_value()
        # A tensor is never a default.
        and (
            isinstance(call[argument.name], Tensor) or call[argument.name] != argument.default_value
        )
    ]
    return f"it takes no {', '.join(refused)}" if refused else None
