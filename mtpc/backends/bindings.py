"""Binding `mtpc::` ops to kernels: each op has candidates in order, each with its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.errors import GraphError
from mtpc.layout.specs import is_buffer_name
from mtpc.ops.collectives import is_collective
from mtpc.ops.signatures import arguments_of
from mtpc.passes.base import Pass
from mtpc.passes.linears import weight_of

Limits = Callable[[fx.Node, StepGraph], str | None]
"""(call, graph) -> why a kernel cannot take the call, by shapes and dtypes; None if it can."""
Configure = Callable[[fx.Node, StepGraph], tuple[str, tuple[str, ...]]]
"""(call, graph) -> the kernel's argument `configs` ("" for its default), and notes on it."""
Wins = Callable[[fx.Node, StepGraph], tuple[bool, tuple[str, ...]]]
"""(call, graph) -> whether a measurement prefers the candidate to those after it; and notes."""
Expand = Callable[[fx.Node, StepGraph], fx.Node]
"""(call, graph) -> the result of calls, emitted before it, that compute what it does."""


def by_default(node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
    """Choose the kernel's default configuration."""
    return "", ()


def always(node: fx.Node, graph: StepGraph) -> tuple[bool, tuple[str, ...]]:
    """Prefer the candidate, which nobody measures."""
    return True, ()


@dataclass(frozen=True)
class Order:
    """The order in which a kernel reads weights, where that is not how they are stored: the
    arguments that are such stacks of matrices, and what arranges some matrices of a stack."""

    name: str
    weights: tuple[str, ...]
    arrange: Callable[[Tensor], Tensor]


_REFERENCE = "the slow PyTorch reference"


@dataclass(frozen=True)
class Binding:
    """A kernel that may replace a reference op.

    Attributes:
        library: where the kernel is from, for notes: "triton", "aiter".
        reference: the reference op, an `mtpc::` overload.
        target: the kernel, an overload with the same arguments and meaning. With `expand` it only
            says which optional arguments are taken, and whose weights are in the `order`.
        refuses: its limits.
        expected: whether a refusal is noted.
        configure: chooses the kernel's configuration, if it has an argument `configs`.
        wins: measures, where the order of the candidates does not say which is faster. That it
            loses is no refusal, and not noted.
        expand: puts other calls in place of the call.
        order: in which it reads weights; None as they are stored. `BindKernels` arranges a weight,
            once and for all steps, when the first call of it is bound.
    """

    library: str
    reference: Any
    target: Any
    refuses: Limits
    expected: bool = True
    configure: Configure = by_default
    wins: Wins = always
    expand: Expand | None = None
    order: Order | None = None


@dataclass(frozen=True)
class BindKernels(Pass, policy="required", name="legalise-gpu"):
    """legalise-gpu: replace each reference op by the first kernel that can take the call.
    `bindings` are in order of preference.

    If none can, the reference op stays. It runs on any device, slowly. Refusals are noted.

    A weight has one order in all steps of a program. A kernel that wants another is refused where
    some step reads the weight as it is stored; a step that would read an arranged weight otherwise
    is an error, never garbage.
    """

    bindings: Sequence[Binding]
    note: Callable[[str], None] = field(default=lambda line: None)

    def apply(self, graph: StepGraph) -> int:
        rewrites, orders = 0, dict[Any, Order]()
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or not str(node.target).startswith("mtpc."):
                continue
            chosen = self._choose(node, graph)
            if chosen is not None:
                if chosen.order is not None:
                    order = orders[chosen.target] = chosen.order
                    for name in order.weights:
                        weight = str(arguments(node)[name].target)
                        graph.weights.orders.arrange(weight, order.name, order.arrange)
                self._bind(node, graph, chosen)
                rewrites += 1
        # Every call reads each weight in the order that it is in, for all steps.
        for node in graph.graph.nodes:
            if node.op != "get_attr" or is_buffer_name(str(node.target)):
                continue
            name = str(node.target)
            for user in node.users if name in graph.weights else ():
                own = orders.get(user.target)
                reads = own is not None and any(
                    arguments(user)[argument] is node for argument in own.weights
                )
                found = graph.weights.orders.read(name, own.name if own and reads else "")
                if found is not None:
                    raise GraphError(
                        f"{graph.name}: {user} reads {name}, which other calls made the order of "
                        f"{found}, in another order; expected one kernel for all of them"
                    )
        return rewrites

    def _bind(self, node: fx.Node, graph: StepGraph, chosen: Binding) -> None:
        if chosen.expand is not None:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(chosen.expand(node, graph))
            graph.graph.erase_node(node)
            return
        configs, lines = chosen.configure(node, graph)
        for line in lines:
            self.note(line)
        node.target = chosen.target
        if configs:
            node.kwargs = {**node.kwargs, "configs": configs}

    def _choose(self, node: fx.Node, graph: StepGraph) -> Binding | None:
        name = str(node.target).removesuffix(".default").replace(".", "::")
        candidates = [b for b in self.bindings if b.reference is node.target]
        # References of these are torch.distributed's, and good for what no kernel can take.
        is_quiet = is_collective(node.target)
        for index, binding in enumerate(candidates):
            reason = (
                _refused_argument(node, binding.target)
                or binding.refuses(node, graph)
                or _refused_order(node, graph, binding.order)
            )
            if reason is None:
                is_best, lines = binding.wins(node, graph)
                for line in lines:
                    self.note(line)
                if is_best:
                    return binding
            elif binding.expected and not is_quiet:
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


def _refused_order(node: fx.Node, graph: StepGraph, order: Order | None) -> str | None:
    """Why the weights of a call cannot be in a kernel's order."""
    for operand in (arguments(node)[name] for name in order.weights) if order else ():
        if weight_of(graph, operand) is None:
            return "weights that a step computes; it takes those of the model, in its own order"
        reason = graph.weights.orders.why_as_stored(str(operand.target))
        if reason is not None:
            return reason
    return None
