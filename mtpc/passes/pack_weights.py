"""pack-weights: weights in the order in which the backend's kernels read, sums in theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import mtpc.ops.float32_linear
import mtpc.ops.packed  # noqa: F401  (these register the ops that this pass calls)
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit, is_call, sweep
from mtpc.passes.head_products import pack_head_products
from mtpc.passes.linears import (
    LinearGroup,
    exchange_experts,
    joined_weight,
    linear_groups,
    replace_groups,
)
from mtpc.weights.packing import can_pack

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PackWeights:
    """Exchange linears and experts on bfloat16 weights for the ops that take packed ones.

    On by default where the backend has kernels for them (cpu). Linears that share an input
    (q/k/v, gate/up) become one: fewer, longer reads come nearer to the memory's speed, and a copy
    is made anyhow. A packed weight exists once for all buckets; a row's result no longer depends
    on how many rows there are, which F.linear does not promise. For that promise's sake float32
    linears of such a model (routers) are exchanged, too, though their weights stay as they are.
    """

    name: ClassVar[str] = "pack-weights"

    def apply(self, graph: StepGraph) -> int:
        groups = linear_groups(graph, lambda node, weight: weight.dim() == 2 and can_pack(weight))
        replace_groups(groups, _packed_linear)
        packed = len(groups) + pack_head_products(graph)
        packed += exchange_experts(graph, lambda node: True, can_pack, _packed_experts)
        return packed + (_widen_linears(graph) if packed else 0)


def _packed_linear(group: LinearGroup) -> fx.Node:
    bias = group.bias()
    packed = group.weight("pack")
    args = (group.input, packed, group.features, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.packed_linear.default, args, group.nodes[0])


def _widen_linears(graph: StepGraph) -> int:
    """Exchange every linear with float32 results, and the casts before it; returns how many."""
    found = [
        node
        for node in graph.graph.nodes
        if is_call(node, aten.linear.default) and node.meta["val"].dtype == torch.float32
    ]
    for node in found:
        args = tuple(_before_casts(operand) for operand in node.args)
        with graph.graph.inserting_before(node):
            wide = emit(graph.graph, torch.ops.mtpc.float32_linear.default, args, node)
        node.replace_all_uses_with(wide)
        graph.graph.erase_node(node)
    if found:
        sweep(graph)
    return len(found)


def _before_casts(operand: object) -> object:
    """What an operand was before it was widened, which is exact."""
    while is_call(operand, *_CASTS) and operand.args[0].meta["val"].dtype in _NARROW:  # type: ignore[attr-defined]
        operand = operand.args[0]  # type: ignore[attr-defined]
    return operand


def _packed_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    x, gate_up, down, *choice = node.args
    weights = [joined_weight(graph, [weight], "pack") for weight in (gate_up, down)]  # type: ignore[list-item]
    args = (x, *weights, *choice)
    return emit(graph.graph, torch.ops.mtpc.packed_experts.default, args, node)
