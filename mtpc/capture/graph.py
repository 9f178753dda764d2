"""StepGraph: one iteration of one bucket as an FX graph over named buffers, with its history."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from mtpc.layout import Layout, Part, StepKey, dtype_name, step_name
from mtpc.weights.recipes import Recipe, make, substitute


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its name, rewrites, seconds, and nodes before and after."""

    name: str
    rewrites: int
    seconds: float
    nodes_before: int
    nodes_after: int


class WeightTable:
    """Weights by name, shared by all graphs of a program, including those that passes derive.

    A derived weight (merged, packed) exists once, whatever number of buckets asks for it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._by_name = dict(tensors)
        self._name_of = {id(tensor): name for name, tensor in self._by_name.items()}
        self.recipes: dict[str, Recipe] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._by_name.items()

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of exactly this tensor object, or None."""
        return self._name_of.get(id(tensor))

    def bind(self, name: str, tensor: Tensor) -> None:
        """Add a weight of the model; for who loads models, not for passes."""
        self._by_name[name] = tensor
        self._name_of[id(tensor)] = name

    def derive(self, name: str, recipe: Recipe) -> Tensor:
        """A weight made from others of this table, by that name.

        Passes have no other way to add a weight: a graph never depends on weights' values, so
        what was compiled for one checkpoint serves its fine-tunes.
        """
        if name not in self._by_name:
            self.bind(name, make(recipe, lambda part: self[part].detach()))
            self.recipes[name] = substitute(recipe, lambda part: self.recipes.get(part, part))
        return self[name]

    def add_constant(self, tensor: Tensor) -> str:
        """A tensor that stands in the model's code; its name says what it holds."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = f"{tensor.dtype}{list(tensor.shape)}".encode() + data.numpy().tobytes()
        name = f"constant.{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self._by_name:
            self.bind(name, tensor)
        return name


@dataclass
class StepGraph:
    """A thin coat over FX.

    Attributes:
        module: the graph; before `fuse-draft-chain` its pieces are `call_module` nodes, after
            it one flat graph of ATen and `mtpc::` ops. Takes and returns nothing: all data is
            in buffers (`state.*`, `batch.*`, `kv.*`) and weights, read through get_attr nodes.
        key: what this step is.
        layout: its buffers at this bucket.
        weights: the program's weight table.
        history: passes run so far.
        part: "step", or which half of a split step.
    """

    module: fx.GraphModule
    key: StepKey
    layout: Layout
    weights: WeightTable
    history: list[PassRecord] = field(default_factory=list)
    part: Part = "step"

    @property
    def name(self) -> str:
        """What to call it in messages and file names."""
        return step_name(self.key, self.part)

    @property
    def is_flat(self) -> bool:
        """Whether all pieces have been inlined."""
        return all(node.op != "call_module" for node in self.graph.nodes)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def num_nodes(self) -> int:
        """Operations in the graph, those of not yet inlined pieces included (once per call)."""
        return sum(_operations(self.module, node) for node in self.graph.nodes)

    def buffer(self, name: str) -> Tensor:
        """The tensor bound to a buffer of the layout."""
        return get_tensor(self.module, name)

    def buffers(self) -> dict[str, Tensor]:
        """All buffers that the module holds, by layout name."""
        held = dict(self.module.named_buffers(remove_duplicate=False))
        return {name: held[name] for name in self.layout if name in held}

    def resize(self, name: str, layout: Layout) -> None:
        """Take `layout` and reallocate one buffer by it."""
        device = self.buffer(name).device
        self.layout = layout
        set_tensor(self.module, name, layout.allocate(name, device), buffer=True)

    def text(self) -> str:
        """The graph, one line a node, in execution order."""
        return "\n".join(_line(node) for node in self.graph.nodes if node.op != "output")

    def clone(self) -> StepGraph:
        """A copy with its own graph, sharing tensors."""
        graph = fx.Graph()
        graph.graph_copy(self.graph, {})
        graph.output(())
        module = fx.GraphModule(self.module, copy_meta(self.graph, graph))
        return StepGraph(module, self.key, self.layout, self.weights, list(self.history), self.part)


def copy_meta(old: fx.Graph, new: fx.Graph) -> fx.Graph:
    """Carry node metadata over to a copy of a graph with the same nodes."""
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
    """`name: dtype[shape] = target(args)`."""
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, Tensor):
        kind = f": {dtype_name(value.dtype)}{list(value.shape)}"
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    target = "" if node.op == "get_attr" else f"({args})"
    return f"%{node.name}{kind} = {node.op.removeprefix('call_')} {node.target}{target}"


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by dotted name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def set_tensor(module: nn.Module, name: str, tensor: Tensor, buffer: bool) -> None:
    """Bind a tensor under a dotted name, creating the submodules in between."""
    *owners, leaf = name.split(".")
    for part in owners:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    elif buffer:
        module.register_buffer(leaf, tensor, persistent=False)
    else:
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def is_buffer_name(name: str) -> bool:
    """Whether a get_attr target is a buffer of the layout rather than a weight."""
    return name.split(".", 1)[0] in ("state", "batch", "kv", "cross")


def operators(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch._ops.OpOverload]]:
    """Nodes that call an operator overload, with the overload."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node, node.target
