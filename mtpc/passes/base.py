"""What a pass is, and how a pipeline of them runs."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from mtpc.capture.effects import eliminate_dead_nodes
from mtpc.capture.graph import PassRecord, StepGraph, get_tensor, set_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import OptionError
from mtpc.weights.recipes import Recipe

aten = torch.ops.aten


class Pass(Protocol):
    """A rewrite: a valid StepGraph in, a valid StepGraph out, changed in place.

    Implementations are frozen dataclasses whose fields are their options.
    """

    name: ClassVar[str]

    def apply(self, graph: StepGraph) -> int:
        """Rewrite; returns the number of rewrites, 0 where nothing was changed."""
        ...


def run_pipeline(
    graph: StepGraph,
    passes: Sequence[Pass],
    check: Callable[[StepGraph, str], None],
    until: str | None = None,
) -> None:
    """Run passes in order, verifying after each.

    Args:
        graph: rewritten in place; its history grows by one record a pass.
        passes: the pipeline.
        check: called with the graph and the pass's name after each pass; raises GraphError.
        until: stop after the pass of this name.

    Raises:
        OptionError: no pass of the pipeline is called `until`.
    """
    if until is not None and until not in [step.name for step in passes]:
        names = ", ".join(step.name for step in passes)
        raise OptionError(f"no pass {until!r} in this pipeline; passes: {names}")
    for step in passes:
        before, start = graph.num_nodes, time.perf_counter()
        rewrites = step.apply(graph)
        graph.module.recompile()
        seconds = time.perf_counter() - start
        graph.history.append(PassRecord(step.name, rewrites, seconds, before, graph.num_nodes))
        check(graph, step.name)
        if step.name == until:
            return


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Append a call at the graph's insertion point, with its fake value; `like` lends its piece."""
    node = graph.call_function(target, args, kwargs)
    with fake_mode_of(graph):
        value = target(*fx.node.map_aggregate(args, _fake), **fx.node.map_aggregate(kwargs, _fake))
    node.meta = {"val": value, "piece": like.meta.get("piece", "step")}
    return node


def emit_weight(graph: StepGraph, name: str, recipe: Recipe, like: fx.Node) -> fx.Node:
    """Append the attribute of a derived weight, made once per program; `like` lends fakes."""
    tensor = graph.weights.derive(name, recipe)
    set_tensor(graph.module, name, tensor, buffer=True)
    node = graph.graph.get_attr(name)
    node.meta = {"val": like.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)}
    return node


def evaluate(graph: StepGraph) -> Iterator[tuple[fx.Node, Any]]:
    """Run a flat graph on fake tensors: each attribute and call with its value, in order."""
    mode = fake_mode_of(graph.graph)
    env: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            tensor = get_tensor(graph.module, str(node.target))
            env[node] = mode.from_tensor(tensor, static_shapes=True)
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
            with mode:
                env[node] = node.target(*args, **kwargs)
        else:
            continue
        yield node, env[node]


def refresh_values(graph: StepGraph) -> None:
    """Recompute all values, after rewrites that change strides or what aliases what."""
    for node, value in evaluate(graph):
        node.meta["val"] = value


def _fake(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def sweep(graph: StepGraph) -> int:
    """Erase what a rewrite left unused; returns nodes erased."""
    return eliminate_dead_nodes(graph.graph)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operator overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


GETITEM = operator.getitem
