"""Inlining the pieces of a traced step: one flat graph at the bucket's exact sizes.

The inliner runs each node on fake tensors while it copies it, so that the symbolic sizes in the
model's traces become numbers. `node.meta["val"]` keeps each result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from mtpc.capture.fake_calls import form_of
from mtpc.capture.graph import StepGraph, get_tensor, module_of, set_tensor
from mtpc.capture.step_mode import StepMode, fake_of, settled
from mtpc.errors import GraphError
from mtpc.ops.signatures import value_of
from mtpc.weights.weights import Weights

aten = torch.ops.aten

_SHAPE_GUARDS = {
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
}
"""Checks that tracing leaves in a graph. Running it on fake tensors has made them already."""


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of a flat graph's values, or a new one where it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if hasattr(value, "fake_mode"):
            return value.fake_mode
    return FakeTensorMode()


def fake_call(
    mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a call: `val`, its result, and `given`, the arguments that `val` is for."""
    given = (fx.node.map_aggregate(args, value_of), fx.node.map_aggregate(kwargs, value_of))
    if isinstance(mode, StepMode):
        return {"val": mode.call(target, *given), "given": given}
    with mode:
        return {"val": target(*given[0], **given[1]), "given": given}


def all_same(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether arguments have the same structure, and `same` holds for all that is in it."""
    if isinstance(one, (list, tuple)):
        alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return alike and all(all_same(a, b, same) for a, b in zip(one, other, strict=True))
    if isinstance(one, Mapping):
        alike = isinstance(other, Mapping) and list(one) == list(other)
        return alike and all(all_same(one[name], other[name], same) for name in one)
    return same(one, other)


def add_attribute(
    root: nn.Module, graph: fx.Graph, mode: FakeTensorMode, name: str, tensor: Tensor
) -> fx.Node:
    """Bind a tensor to `root`, and append its get_attr node with a fake value."""
    set_tensor(root, name, tensor)
    node = graph.get_attr(name)
    node.meta["val"] = fake_of(mode, name, tensor)
    return node


class Inliner:
    """Builds the flat graph. `buffer_names` has layout names by tensor id, for the state that
    pieces hold (`kv.*`)."""

    def __init__(self, source: StepGraph, buffer_names: Mapping[int, str]):
        self.source, self.buffer_names = source, buffer_names
        self.weights: Weights = source.weights
        # Higher-order operators know FakeTensorMode by its very class: those of kernels in Triton.
        self.mode = StepMode(source.layout) if source.layout.open_sizes else FakeTensorMode()
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.attributes: dict[str, fx.Node] = {}
        self._glue: dict[Hashable, fx.GraphModule] = {}
        self.num_inlined = 0

    def run(self) -> fx.GraphModule:
        """Inline all pieces; returns the flat module."""
        env: dict[fx.Node, Any] = {}
        for node in self.source.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "get_attr":
                tensor, target = get_tensor(self.source.module, str(node.target)), str(node.target)
                # A piece may hold this state, too, and tracing may have named it as the piece does.
                env[node] = self._attribute(tensor, self.buffer_names.get(id(tensor), target))
            elif node.op == "call_module":
                env[node] = self._inline(node, env)
            else:
                env[node] = self._call(node, env, piece="step")
        self.graph.output(())
        return module_of(self.root, self.graph)

    def _inline(self, call: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if call.kwargs:
            raise GraphError(
                f"{call.target} is given {', '.join(call.kwargs)} by name; pieces take arguments "
                "by position"
            )
        piece = self.source.module.get_submodule(str(call.target))
        args = _resolve(call.args, env)
        if not isinstance(piece, fx.GraphModule):
            # It is traced at the shapes of its arguments.
            values = fx.node.map_aggregate(args, value_of)
            key = (piece, form_of(values))
            if key not in self._glue:
                with self.mode, _use_lazy_graph_module(True):  # Nobody calls the result.
                    self._glue[key] = make_fx(piece, pre_dispatch=True)(*values)
            piece = self._glue[key]
        self.num_inlined += 1
        inner: dict[fx.Node, Any] = {}
        inputs = iter(args)
        for node in piece.graph.nodes:
            if node.op == "placeholder":
                inner[node] = next(inputs)
            elif node.op == "get_attr":
                inner[node] = self._attribute(get_tensor(piece, str(node.target)), None)
            elif node.op == "output":
                result = fx.node.map_arg(node.args[0], inner.__getitem__)
                # Export puts a single result into a tuple.
                is_one = isinstance(result, (tuple, list)) and len(result) == 1
                return result[0] if is_one else result
            else:
                inner[node] = self._call(
                    node, inner, piece=str(call.target).removeprefix("pieces.")
                )
        return None

    def _attribute(self, tensor: Tensor, name: str | None) -> fx.Node:
        """The get_attr node of a tensor; the graph has one for each tensor."""
        if name is None:
            name = self.buffer_names.get(id(tensor)) or self.weights.name_of(tensor)
        if name is None:  # A constant in the model's code, which tracing made an attribute.
            name = self.weights.add_constant(tensor)
            tensor = self.weights[name]
        if name not in self.attributes:
            self.attributes[name] = add_attribute(self.root, self.graph, self.mode, name, tensor)
        return self.attributes[name]

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], piece: str) -> Any:
        """Copy one call. If its result is a number or an entry of a tuple, return that instead."""
        args = _resolve(node.args, env)
        kwargs = {name: _resolve(value, env) for name, value in node.kwargs.items()}
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        target: Any = node.target
        if getattr(target, "__name__", "").split(".")[0] in _SHAPE_GUARDS:
            return None
        meta = fake_call(self.mode, target, args, kwargs)
        if isinstance(meta["val"], (int, float, bool, torch.SymInt, torch.SymBool)):
            return meta["val"]
        new = self.graph.call_function(target, settled(args), settled(kwargs))
        new.meta = {**meta, "piece": piece}
        return new


def _resolve(value: Any, env: dict[fx.Node, Any]) -> Any:
    """Arguments, with each node of the source replaced by what it became."""
    return fx.node.map_aggregate(value, lambda a: env[a] if isinstance(a, fx.Node) else a)
