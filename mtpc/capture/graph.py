"""StepGraph: one step of one bucket as an FX graph over named buffers, with its pass history."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from mtpc.layout import Layout, Part, StepKey, dtype_name, step_name
from mtpc.layout.progress import PassRecord
from mtpc.layout.specs import Dim
from mtpc.ops.signatures import defaults_of, given_to
from mtpc.weights.weights import Weights

DRAFT_PIECES = ("drafts.", "later_draft")
"""Prefixes of the names of pieces that are MTP layers."""


@dataclass
class StepGraph:
    """One step as an FX graph.

    Attributes:
        module: holds the graph and its tensors. Before fuse-draft-chain, pieces are `call_module`
            nodes; after it, the graph is flat: ATen and `mtpc::` ops. It has no inputs and outputs:
            get_attr nodes read buffers (`state.*`, `batch.*`, `kv.*`) and weights.
        key: phase, bucket and K of the step.
        layout: its buffers at this bucket.
        weights: the program's.
        history: passes that have run.
        part: "step", or "verify" or "propose" of a split step.
    """

    module: fx.GraphModule
    key: StepKey
    layout: Layout
    weights: Weights
    history: list[PassRecord] = field(default_factory=list)
    part: Part = "step"

    @property
    def name(self) -> str:
        return step_name(self.key, self.part)

    @property
    def is_flat(self) -> bool:
        return all(node.op != "call_module" for node in self.graph.nodes)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def num_nodes(self) -> int:
        """Operations in the graph, including those of each call of a piece."""
        return sum(_operations(self.module, node) for node in self.graph.nodes)

    def buffer(self, name: str) -> Tensor:
        """The tensor that is bound to a buffer of the layout."""
        return get_tensor(self.module, name)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the layout that the module holds, by name."""
        held = dict(self.module.named_buffers(remove_duplicate=False))
        return {name: held[name] for name in self.layout if name in held}

    def resize(self, name: str, layout: Layout) -> None:
        """Adopt a layout in which one buffer has another size, and reallocate that buffer."""
        device = self.buffer(name).device
        self.layout = layout
        set_tensor(self.module, name, layout.allocate(name, device))

    def text(self) -> str:
        """The graph as text, one line per node, in order of execution."""
        return "\n".join(_line(node) for node in self.graph.nodes if node.op != "output")

    def clone(self) -> StepGraph:
        """A copy with a graph of its own that shares the tensors."""
        graph = fx.Graph()
        graph.graph_copy(self.graph, {})
        graph.output(())
        module = module_of(self.module, copy_meta(self.graph, graph))
        return StepGraph(module, self.key, self.layout, self.weights, list(self.history), self.part)


def module_of(holder: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph with a holder's tensors. It generates Python code when it is first
    called.

    Passes change a graph many times, and few backends call the module.
    """
    return _LazyGraphModule(holder, graph)


def copy_meta(old: fx.Graph, new: fx.Graph) -> fx.Graph:
    """Copy node metadata from `old` to `new`, a graph with the same nodes; returns `new`."""
    for source, target in zip(old.nodes, new.nodes, strict=True):
        target.meta = copy.copy(source.meta)
    return new


def _operations(module: fx.GraphModule, node: fx.Node) -> int:
    if node.op == "call_module":
        piece = module.get_submodule(str(node.target))
        if isinstance(piece, fx.GraphModule):
            return sum(n.op.startswith("call_") for n in piece.graph.nodes)
    return int(node.op.startswith("call_"))


def _line(node: fx.Node) -> str:
    """A node as `%name: dtype[shape] = kind target(args)`."""
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, Tensor):
        mode = getattr(value, "fake_mode", None)
        sizes = [n if mode is None else dim_of(mode, n) for n in value.shape]
        kind = f": {dtype_name(value.dtype)}{sizes}"
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    target = "" if node.op == "get_attr" else f"({args})"
    return f"%{node.name}{kind} = {node.op.removeprefix('call_')} {node.target}{target}"


def dim_of(mode: Any, size: Any) -> Dim:
    """A size of a fake tensor: a number, or an expression of open sizes by its `StepMode`."""
    return mode.dim(size) if isinstance(size, torch.SymInt) else int(size)


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a module at a dotted name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Bind a tensor to a dotted name of a module, and create missing submodules.

    A `Parameter` stays one; any other tensor becomes a buffer.
    """
    *owners, leaf = name.split(".")
    for part in owners:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if isinstance(getattr(module, leaf, None), Tensor):
        delattr(module, leaf)  # A parameter may take the place of a buffer, or a buffer its place.
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=False)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call of an operator overload, by its name in the schema, in order.

    `node.args` alone lacks arguments that are given by name or left at their defaults.
    """
    return {**defaults_of(node.target), **given_to(node)}


def first_argument(node: fx.Node) -> Any:
    """The first argument of a call of an operator overload."""
    return next(iter(arguments(node).values()))


def operators(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch._ops.OpOverload]]:
    """Each node that calls an operator overload, and that overload."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node, node.target
