"""The launches of calls, of a graph or of an operator by its name. Nothing is launched yet."""

from __future__ import annotations

from typing import Any

from torch import fx

from mtpc.backends.bindings import Configure
from mtpc.backends.triton_kernels import call_launches
from mtpc.backends.triton_kernels.launch import EARLY, Launch
from mtpc.backends.triton_kernels.operator import Operator, Plan
from mtpc.backends.triton_kernels.ops import OPERATORS
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.ops.signatures import value_of

_EARLY_ROWS = 2
"""The most rows of a step whose launches begin early. On an H100, a step of a dense 0.5B model with
one row then takes 0.66 ms instead of 0.74, and one of 8B takes 1 % more. With four rows it lost, as
far as that was measured: before linears read their first weights while they wait."""


def plan(name: str, *args: Any, **kwargs: Any) -> Plan:
    """The launches of an operator, and its results; see `Operator.plan`."""
    return OPERATORS[name].plan(*args, **kwargs)


def step_launches(graph: StepGraph) -> list[Launch]:
    """The launches of our kernels in a legalised step, in order, on fake tensors."""
    with fake_mode_of(graph.graph):
        return [launch for node in graph.graph.nodes for launch in call_launches(node)]


def node_launches(node: fx.Node, configs: str | None = None) -> list[Launch]:
    """The launches of one call of an operator of ours or of its reference; needs a fake mode.

    Args:
        node: the call.
        configs: the configurations; None: those that the call itself names.
    """
    args = fx.node.map_aggregate(node.args, value_of)
    kwargs: dict[str, Any] = dict(fx.node.map_aggregate(node.kwargs, value_of))
    if configs is not None:
        kwargs["configs"] = configs
    return operator_of(node).plan(*args, **kwargs)[0]


def operator_of(node: fx.Node) -> Operator:
    """Our operator that a call names, or whose reference it names."""
    return OPERATORS[op_name(node)]


def op_name(node: fx.Node) -> str:
    """The name of an operator of ours or of its reference, without the namespace."""
    _, name, _ = str(node.target).split(".")
    return name


def has_early_launches(graph: StepGraph) -> bool:
    """Whether a step's launches may begin early: it has few rows."""
    return graph.key.bucket.num_reqs * graph.key.bucket.query_len <= _EARLY_ROWS


def early_in_few_rows(configure: Configure) -> Configure:
    """As `configure`, with "early" for the calls of steps with few rows."""

    def chosen(node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
        configs, notes = configure(node, graph)
        early = EARLY if has_early_launches(graph) else ""
        return ";".join(filter(None, (configs, early))), notes

    return chosen
