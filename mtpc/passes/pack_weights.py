"""pack-weights: weights of linears and experts in the order in which the backend's kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

import mtpc.ops.packed  # noqa: F401  (registers the ops that take packed weights)
from mtpc.capture.graph import StepGraph, get_tensor, is_buffer_name
from mtpc.packing import TILE, can_pack
from mtpc.passes.base import emit, emit_weight, is_call, sweep
from mtpc.recipes import Pack

_LINEAR = torch.ops.aten.linear.default
_EXPERTS = torch.ops.mtpc.experts.default


@dataclass(frozen=True)
class PackWeights:
    """Exchange linears and experts on bfloat16 weights for the ops that take packed ones.

    On by default where the backend has kernels for them (cpu). A packed weight exists once for
    all buckets; a row's result no longer depends on how many rows there are, which F.linear does
    not promise.
    """

    name: ClassVar[str] = "pack-weights"

    def apply(self, graph: StepGraph) -> int:
        calls = [node for node in graph.graph.nodes if _is_packable(graph, node)]
        for node in calls:
            exchange = _pack_linear if is_call(node, _LINEAR) else _pack_experts
            with graph.graph.inserting_before(node):
                packed = exchange(graph, node)
            node.replace_all_uses_with(packed)
            graph.graph.erase_node(node)
        if calls:
            sweep(graph)
        return len(calls)


def _is_packable(graph: StepGraph, node: fx.Node) -> bool:
    if is_call(node, _LINEAR):
        return _weight(graph, node, 1) is not None
    if not is_call(node, _EXPERTS):
        return False
    gate_up, down = _weight(graph, node, 1), _weight(graph, node, 2)
    # Gate and up must each fill their tiles.
    return gate_up is not None and down is not None and down.shape[2] % TILE == 0


def _weight(graph: StepGraph, node: fx.Node, index: int) -> Tensor | None:
    """An operand that is a weight with a packed form, or None."""
    operand = node.args[index]
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    name = str(operand.target)
    weight = None if is_buffer_name(name) else get_tensor(graph.module, name)
    return weight if weight is not None and can_pack(weight) else None


def _pack_linear(graph: StepGraph, node: fx.Node) -> fx.Node:
    x, weight, *bias = node.args
    features = node.meta["val"].shape[-1]
    args = (x, _packed(graph, weight), features, *bias)
    return emit(graph.graph, torch.ops.mtpc.packed_linear.default, args, node)


def _pack_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    x, gate_up, down, *choice = node.args
    args = (x, _packed(graph, gate_up), _packed(graph, down), *choice)
    return emit(graph.graph, torch.ops.mtpc.packed_experts.default, args, node)


def _packed(graph: StepGraph, weight: object) -> fx.Node:
    """get_attr of a weight's packed form, made once per program."""
    assert isinstance(weight, fx.Node)
    name = f"packed.{str(weight.target).replace('.', '_')}"
    return emit_weight(graph, name, Pack(str(weight.target)), weight)
