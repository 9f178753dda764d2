"""pack-weights: weights in the order in which the backend's kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import (
    Pass,
    aten,
    cast,
    emit,
    emit_named,
    emit_weight,
    exchange,
    is_call,
    operands,
    tidy,
)
from mtpc.passes.linears import (
    EXPERT_WEIGHTS,
    LinearGroup,
    draft_nodes,
    exchange_experts,
    joined_packed,
    linear_groups,
    replace_groups,
    weight_of,
)
from mtpc.weights.packing import can_pack
from mtpc.weights.recipes import Blocks, Packed

_GROUPED = (torch.ops.mtpc.grouped_linear.default, torch.ops.mtpc.grouped_experts.default)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)


@dataclass(frozen=True)
class PackWeights(Pass, policy="backend"):
    """Replace linears and experts on bfloat16 weights by ops that read packed weights.

    On by default on backends with kernels for them (cpu). Linears that share an input (q/k/v,
    gate/up) become one: fewer, longer reads come nearer to the memory's bandwidth, and packing
    copies the weights anyway. All buckets share a packed weight.

    With these ops, a row's result does not depend on the number of rows; F.linear does not promise
    that. So that it holds for the whole model, the pass also replaces float32 linears (routers) if
    it or pack-groups has replaced a linear of the target. Their weights stay as they are.
    """

    def apply(self, graph: StepGraph) -> int:
        groups = linear_groups(graph, lambda node, weight: weight.dim() == 2 and can_pack(weight))
        packed = replace_groups(groups, _packed_linear) + _pack_head_products(graph)
        packed += exchange_experts(graph, lambda node, weight: can_pack(weight), _packed_experts)
        draft = draft_nodes(graph.graph)
        is_ours = packed or any(
            is_call(node, *_GROUPED) and node not in draft for node in graph.graph.nodes
        )
        wide = [
            node
            for node in graph.graph.nodes
            if is_call(node, aten.linear.default) and node.meta["val"].dtype == torch.float32
        ]
        return packed + (exchange(graph, wide, _widened) if is_ours else 0)


def _packed_linear(group: LinearGroup) -> fx.Node:
    bias, packed = group.bias(), joined_packed(group.graph, group.weights)
    return group.emit(torch.ops.mtpc.packed_linear.default, packed, group.features, *bias)


def _widened(graph: StepGraph, node: fx.Node) -> fx.Node:
    """A linear with float32 results, without the casts before it."""
    x, weight, bias = (_before_widening(operand) for operand in arguments(node).values())
    args = (x, weight, *([] if bias is None else [bias]))
    return emit(graph.graph, torch.ops.mtpc.float32_linear.default, args, node)


def _before_widening(operand: Any) -> Any:
    """An operand before the casts that widened it; widening is exact."""
    while (source := cast(operand)) is not None:
        if operand.meta["val"].dtype != torch.float32 or source.meta["val"].dtype not in _NARROW:
            break
        operand = source
    return operand


def _packed_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    values = arguments(node)
    for name in EXPERT_WEIGHTS:
        values[name] = joined_packed(graph, [values[name]])
    return emit_named(graph.graph, torch.ops.mtpc.packed_experts.default, values, node)


def _pack_head_products(graph: StepGraph) -> int:
    """Replace batched products over heads by `mtpc::packed_head_linear`; returns how many.

    absorb-latent leaves two of them beside each attention: the rows of each head times a block of
    rows of W. DeepSeek-V4 has one behind it, of groups and whole blocks. A batched matrix product
    reads W across its rows, and its order of addition depends on the number of rows of x. The
    packed op does neither.
    """
    found = [(n, _head_blocks(graph, n)) for n in graph.graph.nodes if is_call(n, *_PRODUCTS)]
    products = [(node, *blocks) for node, blocks in found if blocks is not None]
    for node, weight, blocks in products:
        x, _ = arguments(node).values()
        turned = "t" if blocks.transposed else "n"
        source = str(weight.target).replace(".", "_")
        name = f"packed.{source}_{blocks.count}x{blocks.start}to{blocks.stop}{turned}"
        with graph.graph.inserting_before(node):
            packed = emit_weight(graph, name, Packed(blocks), weight)
            args = (_transposed(x, 0, 1), packed, node.meta["val"].shape[-1])
            rows = emit(graph.graph, torch.ops.mtpc.packed_head_linear.default, args, node)
            again = emit(graph.graph, aten.transpose.int, (rows, 0, 1), node)
        for user in list(node.users):
            if _transposed(user, 0, 1) is not None:
                user.replace_all_uses_with(rows)
        node.replace_all_uses_with(again)
    return tidy(graph, len(products))


def _head_blocks(graph: StepGraph, node: fx.Node) -> tuple[fx.Node, Blocks] | None:
    """The weight of a product over heads, and the block of it, [N, K], that each head reads; None
    for any other product."""
    x, factor = arguments(node).values()
    whole = _transposed(factor, 1, 2)
    taken = factor if whole is None else whole
    view, dim, start, stop = operands(taken, aten.slice.Tensor, 4)
    if view is None:
        view, dim, start, stop = taken, 1, 0, None
    source, _ = operands(view, aten.view.default, 2)
    weight = weight_of(graph, source)
    if _transposed(x, 0, 1) is None or weight is None or dim != 1:
        return None
    stack = view.meta["val"].shape
    if (weight.dim(), len(stack)) != (2, 3) or not can_pack(weight) or x.meta["val"].shape[-1] % 2:
        return None
    stop = stack[1] if stop is None else stop
    return source, Blocks(stack[0], start, stop, whole is None, str(source.target))


def _transposed(node: Any, first: int, second: int) -> Any:
    """The input of a node that transposes these two dimensions, or None."""
    x, *dims = operands(node, aten.transpose.int, 3)
    return x if dims == [first, second] else None
