"""StepGraph: one step of one bucket as an FX graph over named buffers, with its pass history."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from mtpc.errors import GraphError
from mtpc.layout import Layout, Part, StepKey, dtype_name, step_name
from mtpc.layout.specs import Dim
from mtpc.ops.signatures import given_to
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, StoredGroups
from mtpc.weights.quantise import quantised_rows
from mtpc.weights.recipes import (
    Elsewhere,
    Grouped,
    GroupedMaker,
    Join,
    Recipe,
    allocate,
    make,
    names,
    spec_of,
    substitute,
)

DRAFT_PIECES = ("drafts.", "later_draft")
"""Prefixes of the names of pieces that are MTP layers."""
_ORDER = "_mtpc_order"
"""Attribute of a tensor whose elements are in a kernel's order; see `order_of`."""
_ARRANGED_BYTES = 64 << 20
"""Bytes of a weight that are out of place at a time, while it is brought into another order."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Attributes:
        name: of the pass.
        rewrites: number of rewrites.
        seconds: how long it took.
        nodes_before: operations in the graph before it.
        nodes_after: operations in the graph after it.
    """

    name: str
    rewrites: int
    seconds: float
    nodes_before: int
    nodes_after: int


class WeightTable:
    """Weights by name, for all graphs of a program: the model's, and those that passes derive.

    All buckets share a derived (merged, packed) weight.

    Args:
        tensors: the model's weights by name.
        groups: those of them that are stored in groups.
        owned: whether nothing else holds the tensors. The parts of a concatenation then become
            views of it, so that no weight is in memory twice.
        elsewhere: makes what passes derive, where the tensors are placeholders; it is then moved
            to their device. None: the tensors have all values.

    Attributes:
        recipes: derived weights by name: how each is made from weights of the model.
        wholes: parts that this rank holds by name: the weight that each is a part of.
        defers: whether derived weights are memory without contents until `settle`. A build that
            only writes packages needs no contents.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        groups: StoredGroups | None = None,
        owned: bool = False,
        elsewhere: Elsewhere | None = None,
    ):
        self.defers, self._owned, self._elsewhere = False, owned, elsewhere
        self._groups = groups or StoredGroups()
        self._maker = GroupedMaker(self._grouped)
        self._deferred: set[str] = set()
        self._by_name = dict(tensors)
        self._name_of = {id(tensor): name for name, tensor in self._by_name.items()}
        self.recipes: dict[str, Recipe] = {}
        self.wholes: dict[str, str] = {}
        self._made: dict[Recipe, Tensor] = {}
        self._holders: dict[Hashable, str] = {}
        self._read_as_stored: set[int] = set()
        self._arrangements: dict[str, Callable[[Tensor], Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._by_name.items()

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of this very tensor object; None if it is not in the table."""
        return self._name_of.get(id(tensor))

    def spec(self, name: str) -> GroupSpec | None:
        """How a weight is stored in groups; None for a plain one."""
        return spec_of(self.recipes.get(name, name), self._groups.specs)

    def bind(self, name: str, tensor: Tensor) -> None:
        """Add a weight of the model. Loaders use it; passes use `derive`."""
        self._by_name[name] = tensor
        self._name_of[id(tensor)] = name

    def derive(self, name: str, recipe: Recipe) -> Tensor:
        """The weight of that name. The first call makes it by the recipe.

        This is the only way for passes to add a weight. So graphs do not depend on the values of
        weights, and steps compiled for one checkpoint serve its fine-tunes.
        """
        if name not in self._by_name:
            whole = substitute(recipe, lambda part: self.recipes.get(part, part))
            made_of = whole if isinstance(recipe, Grouped) else recipe
            if self.defers:
                self.bind(name, allocate(made_of, self._tensor))
                self._deferred.add(name)
            else:
                self.bind(name, self._make(made_of))
            self.recipes[name] = whole
        return self[name]

    def _grouped(self, name: str, spec: GroupSpec) -> GroupedRows:
        """A weight in groups: as its checkpoint stores it, or rounded here."""
        if spec.is_of(self._groups.specs.get(name)):
            return self._groups.read(name)
        return quantised_rows(self._tensor(name), spec)

    def settle(self) -> None:
        """Make the derived weights that have no contents yet, as new tensors; defer no more.

        Steps are bound from now on. If all of them come from the cache, no pass has derived any
        weight, and binding derives each weight when a step asks for it.
        """
        self.defers = False
        for name in sorted(self._deferred):
            self.bind(name, self._make(self.recipes[name]))
        self._deferred.clear()

    def _make(self, recipe: Recipe) -> Tensor:
        """The weight of a recipe; the same recipe over the same memory gives the same tensor."""
        same = substitute(recipe, self._holder)
        if same not in self._made:
            elsewhere = self._elsewhere
            if elsewhere is not None and all(name in elsewhere for name in names(recipe)):
                made = elsewhere.make(recipe)
            elif isinstance(recipe, Grouped):
                made = self._maker.make(recipe)
            else:
                made = make(recipe, self._tensor)
            made = made.to(self[next(names(recipe))].device)
            self._made[same] = made
            if self._owned and isinstance(recipe, Join) and recipe.op == "cat":
                self._take_the_place(made, recipe)
        return self._made[same]

    def _take_the_place(self, made: Tensor, recipe: Join) -> None:
        """Make the parts of a concatenation views of it. Views taken before keep the old memory."""
        start = 0
        for part in recipe.parts:
            tensor = self[part] if isinstance(part, str) else None
            if tensor is None or tensor.dtype != made.dtype or tensor.is_meta:
                return
            stop = start + tensor.shape[0]
            tensor.data = made[start:stop]
            start = stop

    def _holder(self, name: str) -> str:
        """The first weight seen in the memory of this one: itself, or the one it is a copy of."""
        tensor = self._tensor(name)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return self._holders.setdefault(memory, name)

    def _tensor(self, name: str) -> Tensor:
        order = order_of(self[name])
        if order:
            raise GraphError(
                f"a weight is to be made of {name}, whose elements are in the order of {order}; "
                "no step may read it in any other way"
            )
        return self[name].detach()

    def why_as_stored(self, name: str) -> str | None:
        """Why the elements of a weight must stay where they are; None if they may be moved."""
        tensor = self[name]
        if order_of(tensor):
            return None
        if tensor.data_ptr() in self._read_as_stored:
            return f"another step reads {name} as it is stored"
        if not self._owned and name not in self.recipes:
            return "the model object keeps its weights, and a copy is not made: pass its directory"
        memory = tensor.untyped_storage()
        others = (t for t in self._by_name.values() if t is not tensor)
        if not tensor.is_contiguous() or memory.nbytes() != tensor.nbytes:
            return f"{name} is a part of something else, or has gaps"
        if any(other.untyped_storage().data_ptr() == memory.data_ptr() for other in others):
            return f"{name} shares its memory with another weight"
        return None

    def arrange(self, name: str, order: str, arrange: Callable[[Tensor], Tensor]) -> None:
        """Move the elements of a stack of matrices to where a kernel reads them, in its own memory.

        The first call does it, and marks the tensor. Then all steps of all programs over this
        tensor must read it by that kernel: nothing else holds the elements as they are stored.

        Args:
            name: a weight that `why_as_stored` has nothing against.
            order: the name of the order; see `order_of`.
            arrange: some matrices of the stack -> new ones of the same form.

        Raises:
            GraphError: it is in another order, or `arrange` gives something of another form.
        """
        tensor, self._arrangements[order] = self[name], arrange
        if order_of(tensor) == order:
            return
        stack = self._tensor(name)
        for part in stack.split(max(1, _ARRANGED_BYTES // max(1, stack[0].nbytes))):
            made = arrange(part)
            if made.shape != part.shape or made.dtype != part.dtype:
                raise GraphError(
                    f"{order} made {made.dtype} {list(made.shape)} of {name}'s {part.dtype} "
                    f"{list(part.shape)}; expected the same form"
                )
            part.copy_(made)
        setattr(tensor, _ORDER, order)

    def can_read_alike(self, name: str, other: str) -> bool:
        """Whether a weight can have the order of another, which is settled."""
        order = order_of(self[other])
        return self.why_as_stored(name) is None if order else not order_of(self[name])

    def read_alike(self, name: str, other: str) -> None:
        """A step reads a weight as it reads another; see `can_read_alike`."""
        order = order_of(self[other])
        if order:
            self.arrange(name, order, self._arrangements[order])
        self.read(name, order)

    def read(self, name: str, order: str) -> str | None:
        """Note that a step reads a weight in an order of elements; "" is the stored order.

        Returns:
            The weight's own order if it differs; None if it is the order that the step reads.
        """
        found = order_of(self[name])
        if not order:
            self._read_as_stored.add(self[name].data_ptr())
        return None if found == order else found or "the checkpoint"

    def add_constant(self, tensor: Tensor) -> str:
        """Add a constant of the model's code; returns its name, a digest of its contents."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = f"{tensor.dtype}{list(tensor.shape)}".encode() + data.numpy().tobytes()
        name = f"constant.{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self._by_name:
            self.bind(name, tensor)
        return name


@dataclass
class StepGraph:
    """One step as an FX graph.

    Attributes:
        module: holds the graph and its tensors. Before fuse-draft-chain, pieces are `call_module`
            nodes; after it, the graph is flat: ATen and `mtpc::` ops. It has no inputs and outputs:
            get_attr nodes read buffers (`state.*`, `batch.*`, `kv.*`) and weights.
        key: phase, bucket and K of the step.
        layout: its buffers at this bucket.
        weights: the program's weight table.
        history: passes that have run.
        part: "step", or "verify" or "propose" of a split step.
    """

    module: fx.GraphModule
    key: StepKey
    layout: Layout
    weights: WeightTable
    history: list[PassRecord] = field(default_factory=list)
    part: Part = "step"

    @property
    def name(self) -> str:
        """Name of the step for messages and files."""
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


def order_of(tensor: Tensor) -> str:
    """In which kernel's order the elements of a weight are; "" as they are stored."""
    return str(getattr(tensor, _ORDER, ""))


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


def is_buffer_name(name: str) -> bool:
    """Whether a get_attr target is a buffer of the layout, as opposed to a weight."""
    return name.split(".", 1)[0] in ("state", "batch", "kv", "cross")


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call of an operator overload, by its name in the schema, in order.

    `node.args` alone lacks arguments that are given by name or left at their defaults.
    """
    overload: Any = node.target
    defaults = {a.name: a.default_value for a in overload._schema.arguments}
    return defaults | given_to(node)


def first_argument(node: fx.Node) -> Any:
    """The first argument of a call of an operator overload."""
    return next(iter(arguments(node).values()))


def operators(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch._ops.OpOverload]]:
    """Each node that calls an operator overload, and that overload."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node, node.target
