"""What a pass is, and how a pipeline of them runs."""

from __future__ import annotations

import operator
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from mtpc.capture.effects import eliminate_dead_nodes, storages
from mtpc.capture.fake_calls import FakeCalls
from mtpc.capture.graph import StepGraph, arguments, first_argument, get_tensor
from mtpc.capture.inline import add_attribute, all_same, fake_call, fake_mode_of
from mtpc.capture.step_mode import fake_of
from mtpc.errors import OptionError
from mtpc.layout.progress import PassRecord
from mtpc.ops.signatures import defaults_of, value_of
from mtpc.ops.traits import traits_of
from mtpc.weights.recipes import Recipe

aten = torch.ops.aten

Policy = Literal["required", "on", "backend", "off"]
"""When a pass runs. `required`: always, because without it the graph is not valid or not flat.
`on`: unless it is disabled. `backend`: if the backend names it or it is enabled. `off`: only if it
is enabled."""


class Pass(ABC):
    """A rewrite: a valid StepGraph in, a valid StepGraph out, changed in place.

    Implementations are frozen dataclasses whose fields are their options.

    The options `enabled_passes` and `disabled_passes` have its `name`, by default that of the
    class, in words. `policy` says when it runs.
    """

    name: ClassVar[str]
    policy: ClassVar[Policy]

    def __init_subclass__(cls, policy: Policy, name: str = "") -> None:
        cls.policy = policy
        cls.name = name or re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    @abstractmethod
    def apply(self, graph: StepGraph) -> int:
        """Rewrite; returns the number of rewrites, 0 where nothing was changed."""


def run_pipeline(
    graph: StepGraph,
    passes: Sequence[Pass],
    check: Callable[[StepGraph, str], None],
    until: str | None = None,
) -> None:
    """Run passes in order, on a graph whose history grows by one record a pass. `check` gets the
    graph and the pass's name after each, and raises GraphError. The pass `until` is the last.

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
    """Append a call at the insertion point, with its fake value, to the piece of the node
    `like`."""
    node = graph.call_function(target, args, kwargs)
    meta = fake_call(fake_mode_of(graph), target, args, kwargs)
    node.meta = {**meta, "piece": like.meta.get("piece", "step")}
    return node


def emit_named(graph: fx.Graph, target: Any, values: Mapping[str, Any], like: fx.Node) -> fx.Node:
    """`emit` with arguments given by name; the others keep their defaults.

    The call gives arguments by position up to the last one that differs from its default, and
    keyword-only arguments by name.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    num_args = 0
    for argument in target._schema.arguments:
        value = values.get(argument.name, argument.default_value)
        is_set = not argument.has_default_value() or value != argument.default_value
        if argument.kwarg_only:
            kwargs |= {argument.name: value} if is_set else {}
            continue
        args.append(value)
        num_args = len(args) if is_set else num_args
    return emit(graph, target, tuple(args[:num_args]), like, **kwargs)


def emit_weight(graph: StepGraph, name: str, recipe: Recipe, like: fx.Node) -> fx.Node:
    """Append the get_attr node of a derived weight, which is made once per program."""
    return emit_attribute(graph, name, graph.weights.derive(name, recipe), like)


def emit_attribute(graph: StepGraph, name: str, tensor: Tensor, like: fx.Node) -> fx.Node:
    """Append the get_attr node of a tensor; its fake mode is that of the node `like`."""
    return add_attribute(graph.module, graph.graph, like.meta["val"].fake_mode, name, tensor)


def evaluate(graph: StepGraph) -> Iterator[tuple[fx.Node, Any]]:
    """Run a flat graph on fake tensors: each attribute and call with its value, in order.

    It remembers no call of those that made the graph.
    """
    mode = fake_mode_of(graph.graph)
    calls = FakeCalls(mode)
    env: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            tensor = get_tensor(graph.module, str(node.target))
            env[node] = fake_of(mode, str(node.target), tensor)
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
            env[node] = calls.value(node.target, args, kwargs)
        else:
            continue
        yield node, env[node]


def refresh_values(graph: StepGraph) -> None:
    """Recompute values after rewrites that change strides or aliases.

    A call whose arguments are the same objects as before keeps its value. If a new value has the
    form of the old one, the call keeps the old one, so that calls after it keep theirs, too.
    """
    mode, taken = fake_mode_of(graph.graph), set[int]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and not _has_value(node):
            meta = fake_call(mode, node.target, node.args, node.kwargs)
            if _is_alike(node.meta, meta, taken):
                meta["val"] = node.meta["val"]
            node.meta |= meta
        taken.update(storages(node.meta.get("val")))


def _is_alike(old: Mapping[str, Any], new: Mapping[str, Any], taken: set[int]) -> bool:
    """Whether two values of one call have the same form, and each has memory of its own, which no
    call before has `taken`."""
    one, other = old.get("val"), new["val"]
    if "given" not in old or not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if _form(one) != _form(other):
        return False
    theirs = taken.union(storages([old["given"], new["given"]]))
    return theirs.isdisjoint((*storages(one), *storages(other)))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), nbytes


def _has_value(node: fx.Node) -> bool:
    """Whether `val` is for the arguments that the call has now."""
    now = (fx.node.map_aggregate(node.args, value_of), fx.node.map_aggregate(node.kwargs, value_of))
    return "given" in node.meta and all_same(now, node.meta["given"], _same)


def _same(one: Any, other: Any) -> bool:
    """Whether arguments are equal; tensors are if they are the same object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)


def sweep(graph: StepGraph, rewrites: int = 1) -> int:
    """Erase what rewrites left unused, if there are any rewrites; returns their number."""
    if rewrites:
        eliminate_dead_nodes(graph.graph)
    return rewrites


def exchange(
    graph: StepGraph, nodes: Sequence[fx.Node], call: Callable[[StepGraph, fx.Node], fx.Node]
) -> int:
    """Put what `call` emits in place of each of some calls, and sweep; returns their number."""
    for node in nodes:
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, node))
        graph.graph.erase_node(node)
    return sweep(graph, len(nodes))


def tidy(graph: StepGraph, rewrites: int) -> int:
    """Sweep and refresh values after rewrites, if there are any; returns their number."""
    if sweep(graph, rewrites):
        refresh_values(graph)
    return rewrites


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operator overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


GETITEM = operator.getitem


def operands(node: Any, target: Any, count: int) -> tuple[Any, ...]:
    """The first `count` arguments of a call of `target`, in the schema's order, defaults filled in,
    if all others are at their defaults. As many None for any other node, and for a call with
    another argument set."""
    values = list(arguments(node).values()) if is_call(node, target) else []
    rest = [*defaults_of(target).values()][count:] if values else []
    is_plain = values[count:] == rest
    return tuple(values[:count]) if values and is_plain else (None,) * count


def either_way(node: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    """Both orders of the operands of a call of a commutative operator."""
    left, right = operands(node, target, 2)
    return () if left is None else ((left, right), (right, left))


def cast(node: Any) -> Any:
    """The input of a cast that changes the dtype only; None for any other node."""
    if not isinstance(node, fx.Node) or traits_of(node.target).dims != "cast":
        return None
    source = first_argument(node)
    before, after = source.meta["val"], node.meta["val"]
    moves = before.device != after.device or before.layout != after.layout
    return None if moves else source


def is_narrow(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16
