"""pack-weights: weights in the order in which the backend's kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import mtpc.ops.float32_linear
import mtpc.ops.grouped
import mtpc.ops.packed  # noqa: F401  (these register the ops that this pass calls)
from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Policy, emit, emit_named, is_call, sweep
from mtpc.passes.head_products import pack_head_products
from mtpc.passes.linears import (
    EXPERT_WEIGHTS,
    LinearGroup,
    draft_nodes,
    exchange_experts,
    joined_packed,
    linear_groups,
    replace_groups,
)
from mtpc.passes.patterns import cast
from mtpc.weights.packing import can_pack

aten = torch.ops.aten

_GROUPED = (torch.ops.mtpc.grouped_linear.default, torch.ops.mtpc.grouped_experts.default)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PackWeights:
    """Replace linears and experts on bfloat16 weights by ops that read packed weights.

    On by default on backends with kernels for them (cpu). Linears that share an input (q/k/v,
    gate/up) become one: fewer, longer reads come nearer to the memory's bandwidth, and packing
    copies the weights anyway. All buckets share a packed weight.

    With these ops, a row's result does not depend on the number of rows; F.linear does not promise
    that. To keep the promise for the whole model, the pass also replaces float32 linears (routers),
    whose weights stay as they are, where it or pack-groups has replaced one of the target's.
    """

    name: ClassVar[str] = "pack-weights"
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        groups = linear_groups(graph, lambda node, weight: weight.dim() == 2 and can_pack(weight))
        replace_groups(groups, _packed_linear)
        packed = len(groups) + pack_head_products(graph)
        packed += exchange_experts(graph, lambda node, weight: can_pack(weight), _packed_experts)
        draft = draft_nodes(graph.graph)
        is_ours = packed or any(
            is_call(node, *_GROUPED) and node not in draft for node in graph.graph.nodes
        )
        return packed + (_widen_linears(graph) if is_ours else 0)


def _packed_linear(group: LinearGroup) -> fx.Node:
    bias = group.bias()
    packed = group.packed()
    args = (group.input, packed, group.features, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.packed_linear.default, args, group.nodes[0])


def _widen_linears(graph: StepGraph) -> int:
    """Replace every linear with float32 results, and the casts before it; returns how many."""
    found = [
        node
        for node in graph.graph.nodes
        if is_call(node, aten.linear.default) and node.meta["val"].dtype == torch.float32
    ]
    for node in found:
        x, weight, bias = (_before_widening(operand) for operand in arguments(node).values())
        args = (x, weight, *([] if bias is None else [bias]))
        with graph.graph.inserting_before(node):
            wide = emit(graph.graph, torch.ops.mtpc.float32_linear.default, args, node)
        node.replace_all_uses_with(wide)
        graph.graph.erase_node(node)
    if found:
        sweep(graph)
    return len(found)


def _before_widening(operand: Any) -> Any:
    """An operand before the casts that widened it; widening is exact."""
    source = cast(operand)
    while source is not None and _is_widening(source, operand):
        operand, source = source, cast(source)
    return operand


def _is_widening(source: fx.Node, result: fx.Node) -> bool:
    return result.meta["val"].dtype == torch.float32 and source.meta["val"].dtype in _NARROW


def _packed_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    values = arguments(node)
    for name in EXPERT_WEIGHTS:
        values[name] = joined_packed(graph, [values[name]])
    return emit_named(graph.graph, torch.ops.mtpc.packed_experts.default, values, node)
