"""The verifier: the rules that every StepGraph must keep, checked after each pass."""

from __future__ import annotations

import difflib
import operator
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.capture.effects import Effects, analyse, storages
from mtpc.capture.graph import StepGraph, arguments, operators
from mtpc.errors import GraphError
from mtpc.layout.specs import HOST, is_buffer_name
from mtpc.ops.traits import traits_of
from mtpc.passes.base import evaluate
from mtpc.passes.resize_metadata import row_demands

EffectTrace = dict[str, list[str]]

_SYNC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Verifier:
    """Checks one graph after each pass, and compares its effects with those after the pass before.
    With `propagate`, it recomputes the shape, dtype and memory of every node on fake tensors."""

    def __init__(self, propagate: bool):
        self.propagate = propagate
        self._effects: EffectTrace | None = None

    def __call__(self, graph: StepGraph, pass_name: str) -> None:
        """Check all rules after a pass. Raises GraphError: a rule is broken; the message names the
        pass, the rule and the node."""
        try:
            graph.graph.lint()
        except (RuntimeError, AttributeError) as error:
            raise GraphError(f"after {pass_name}: malformed FX graph: {error}") from error
        check_row_demands(graph, pass_name)
        if not graph.is_flat:
            return
        check_operators(graph, pass_name)
        effects = analyse(graph.graph)
        check_writers(graph, effects, pass_name)
        trace = effect_trace(graph.graph, effects)
        before, self._effects = self._effects, trace
        if before is not None and before != trace:
            changed = sorted(
                name for name in before.keys() | trace.keys() if before.get(name) != trace.get(name)
            )
            name = changed[0]
            diff = list(
                difflib.unified_diff(before.get(name, []), trace.get(name, []), lineterm="", n=0)
            )[2:]
            raise GraphError(f"after {pass_name}: effects on {name} changed: {'; '.join(diff)}")
        if self.propagate:
            check_values(graph, pass_name)


def check_row_demands(graph: StepGraph, pass_name: str) -> None:
    """Check that no slice of a metadata buffer is longer than the buffer.

    Such a slice would be clamped without an error.

    Raises:
        GraphError: a buffer is too short.
    """
    for name, demand in row_demands(graph).items():
        rows = graph.layout.shape(name)[0]
        held = graph.buffer(name).shape[0]
        if demand > min(rows, held):
            raise GraphError(
                f"after {pass_name}: {name} has {min(rows, held)} rows at {graph.key}; the graph "
                f"uses {demand}; the pass resize-metadata must run first"
            )


def check_operators(graph: StepGraph, pass_name: str) -> None:
    """Check that all calls are operator overloads and that none makes the host wait.

    Raises:
        GraphError: a node calls something else, or an operator whose result the host must read.
    """
    for node in graph.graph.nodes:
        allowed = node.op in ("get_attr", "output") or node.target is operator.getitem
        if not allowed and not isinstance(node.target, torch._ops.OpOverload):
            raise GraphError(
                f"after {pass_name}: {node} calls {node.target} ({node.op}); expected an operator "
                "overload"
            )
    for node, op in operators(graph.graph):
        if any(tag in op.tags for tag in _SYNC_TAGS) and not _indexes_by_integer(node):
            raise GraphError(
                f"after {pass_name}: {op} ({node}) makes the host wait for the device; a captured "
                "graph would freeze its result"
            )


def _indexes_by_integer(node: fx.Node) -> bool:
    """Whether a node is `index.Tensor` without masks: only masks make its shape data-dependent."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [i for i in arguments(node)["indices"] if isinstance(i, fx.Node)]
    return all(i.meta["val"].dtype not in (torch.bool, torch.uint8) for i in indices)


def check_writers(graph: StepGraph, effects: Effects, pass_name: str) -> None:
    """Check that the step writes no weight and no buffer that only the host writes.

    Raises:
        GraphError: a node writes one.
    """
    for node in graph.graph.nodes:
        for root in effects.writes[node]:
            if not isinstance(root, str):
                continue
            if not is_buffer_name(root):
                raise GraphError(
                    f"after {pass_name}: {node} ({node.target}) writes the weight {root}; a step "
                    "must not change weights"
                )
            if root in graph.layout and graph.layout[root].writers == HOST:
                raise GraphError(
                    f"after {pass_name}: {node} writes {root}, which only the host may write"
                )


def effect_trace(graph: fx.Graph, effects: Effects) -> EffectTrace:
    """Buffer name -> its writes by any operator and, for caches, its reads by operators with state.

    Both are in order of execution.
    """
    trace: EffectTrace = {}
    for node, op in operators(graph):
        names, traits = effects.buffer_writes(node), traits_of(op)
        writer = traits.writes_as or op.overloadpacket.__name__
        for name in names:
            trace.setdefault(name, []).append(f"write {writer}")
        if traits.pages or traits.slots:
            for root in effects.reads(node):
                if isinstance(root, str) and root.startswith("kv.") and root not in names:
                    trace.setdefault(root, []).append("read")
    return trace


def check_values(graph: StepGraph, pass_name: str) -> None:
    """Run every node again on fake tensors, and compare shape, dtype and aliases to its metadata.

    Raises:
        GraphError: a node fails, or differs from its metadata.
    """
    memory: dict[int, int] = {}
    last = "its first node"
    try:
        for node, value in evaluate(graph):
            claimed = node.meta.get("val")
            if isinstance(value, Tensor) and isinstance(claimed, Tensor):
                found, wanted = ((t.dtype, tuple(t.shape)) for t in (value, claimed))
                if found != wanted:
                    raise GraphError(
                        f"after {pass_name}: {node} is {found}; its metadata says {wanted}"
                    )
            _compare_memory(value, node, memory, pass_name)
            last = node.name
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise GraphError(f"after {pass_name}: the node after {last} fails: {error}") from error


def _compare_memory(value: Any, node: fx.Node, memory: dict[int, int], pass_name: str) -> None:
    """Check that values which share memory by their metadata do share it; effects rely on that."""
    for found, claimed in zip(storages(value), storages(node.meta.get("val")), strict=False):
        if memory.setdefault(claimed, found) != found:
            raise GraphError(
                f"after {pass_name}: the memory of {node} is not the one that its metadata claims"
            )
