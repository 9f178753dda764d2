"""pack-weights: weights of linears and experts in the order in which the backend's kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import mtpc.ops.packed  # noqa: F401  (registers the ops that take packed weights)
from mtpc.capture.graph import StepGraph
from mtpc.packing import TILE, can_pack
from mtpc.passes.base import emit, is_call, sweep
from mtpc.passes.linears import LinearGroup, joined_weight, linear_groups, replace_groups, weight_of


@dataclass(frozen=True)
class PackWeights:
    """Exchange linears and experts on bfloat16 weights for the ops that take packed ones.

    On by default where the backend has kernels for them (cpu). Linears that share an input
    (q/k/v, gate/up) become one: fewer, longer reads come nearer to the memory's speed, and a copy
    is made anyhow. A packed weight exists once for all buckets; a row's result no longer depends
    on how many rows there are, which F.linear does not promise.
    """

    name: ClassVar[str] = "pack-weights"

    def apply(self, graph: StepGraph) -> int:
        groups = linear_groups(graph, lambda node, weight: weight.dim() == 2 and can_pack(weight))
        replace_groups(groups, _packed_linear)
        return len(groups) + _pack_experts(graph)


def _packed_linear(group: LinearGroup) -> fx.Node:
    bias = group.bias()
    packed = group.weight("pack")
    args = (group.input, packed, group.features, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.packed_linear.default, args, group.nodes[0])


def _pack_experts(graph: StepGraph) -> int:
    """Exchange every call on weights that fill their tiles; returns how many."""
    calls = [
        node
        for node in graph.graph.nodes
        if is_call(node, torch.ops.mtpc.experts.default) and _experts_are_packable(graph, node)
    ]
    for node in calls:
        x, gate_up, down, *choice = node.args
        with graph.graph.inserting_before(node):
            weights = [joined_weight(graph, [weight], "pack") for weight in (gate_up, down)]
            args = (x, *weights, *choice)
            packed = emit(graph.graph, torch.ops.mtpc.packed_experts.default, args, node)
        node.replace_all_uses_with(packed)
        graph.graph.erase_node(node)
    if calls:
        sweep(graph)
    return len(calls)


def _experts_are_packable(graph: StepGraph, node: fx.Node) -> bool:
    gate_up, down = (weight_of(graph, node.args[index]) for index in (1, 2))
    if gate_up is None or down is None or not (can_pack(gate_up) and can_pack(down)):
        return False
    return down.shape[2] % TILE == 0  # Gate and up must each fill their tiles.
