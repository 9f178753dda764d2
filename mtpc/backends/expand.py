"""A function in place of a call: its ATen calls, which Inductor sees and fuses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mtpc.capture.fake_calls import form_of, map_tensors, tensors_in
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.ops.signatures import arguments_of, given_to
from mtpc.passes.base import emit

Function = Callable[..., Tensor]
"""Takes a reference operator's arguments by its names, and computes the same."""
Traced = dict[Hashable, fx.GraphModule]


def expand(
    node: fx.Node, graph: StepGraph, function: Function, traced: Traced | None = None
) -> fx.Node:
    """Emit, at the insertion point, the calls that a function makes of a call's arguments, in whose
    place they are. Returns the node of its result. `traced` has calls of this function by the form
    of its arguments; those found are added."""
    values, traced = arguments_of(node), {} if traced is None else traced
    form = form_of(values)
    if form not in traced:
        traced[form] = trace_call(fake_mode_of(graph.graph), function, (), values)
    module = traced[form]
    given = (argument for argument in given_to(node).values() if isinstance(argument, fx.Node))
    held: dict[fx.Node, Any] = {}
    for inner in module.graph.nodes:
        if inner.op == "placeholder":
            held[inner] = next(given)
        elif inner.op == "output":
            break
        else:
            args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), held.__getitem__)
            held[inner] = emit(graph.graph, inner.target, args, node, **kwargs)
    result: fx.Node = held[inner.args[0][0]]
    return result


def trace_call(
    mode: FakeTensorMode, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.GraphModule:
    """The ATen calls of a function: a module of the tensors among its arguments, in order, which
    returns the result in a tuple. Tensors are fake. The function makes no tensor out of Python's
    numbers, and reads no tensor's values."""
    given = (args, dict(kwargs))

    def call(*tensors: Tensor) -> tuple[Tensor]:
        left = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(left), given)
        return (function(*args, **kwargs),)

    with mode:
        traced: fx.GraphModule = make_fx(call, pre_dispatch=True)(*tensors_in(given))
    return traced
