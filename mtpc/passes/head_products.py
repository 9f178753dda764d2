"""Per-head products: each head's rows with that head's block of a weight, on packed blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit, emit_weight, is_call, refresh_values, sweep
from mtpc.passes.linears import weight_of
from mtpc.passes.patterns import operands
from mtpc.weights.packing import can_pack
from mtpc.weights.recipes import Blocks, Packed

aten = torch.ops.aten


def pack_head_products(graph: StepGraph) -> int:
    """Replace batched products over heads by `mtpc::packed_head_linear`.

    absorb-latent leaves two of them beside each attention: the rows of each head times a block of
    rows of W. A batched matrix product reads W across its rows, and its order of addition depends
    on the number of rows of x. The packed op does neither.

    Returns:
        The number of products replaced.
    """
    found = [(n, _blocks(graph, n)) for n in graph.graph.nodes if is_call(n, aten.matmul.default)]
    products = [(node, *blocks) for node, blocks in found if blocks is not None]
    for node, weight, blocks in products:
        _exchange(graph, node, weight, blocks)
    if products:
        sweep(graph)
        refresh_values(graph)
    return len(products)


def _blocks(graph: StepGraph, node: fx.Node) -> tuple[fx.Node, Blocks] | None:
    """The weight of a product over heads, and the block of it, [N, K], that each head reads; None
    for any other product."""
    x, factor = operands(node, aten.matmul.default, 2)
    whole = _transposed(factor, 1, 2)
    view, dim, start, stop = operands(factor if whole is None else whole, aten.slice.Tensor, 4)
    source, _ = operands(view, aten.view.default, 2)
    weight = weight_of(graph, source)
    if _transposed(x, 0, 1) is None or weight is None or dim != 1:
        return None
    if weight.dim() != 2 or not can_pack(weight) or x.meta["val"].shape[-1] % 2:
        return None
    heads = view.meta["val"].shape[0]
    return source, Blocks(heads, start, stop, whole is None, str(source.target))


def _exchange(graph: StepGraph, node: fx.Node, weight: fx.Node, blocks: Blocks) -> None:
    x, _ = operands(node, aten.matmul.default, 2)
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


def _transposed(node: Any, first: int, second: int) -> Any:
    """The input of a node that transposes these two dimensions, or None."""
    x, *dims = operands(node, aten.transpose.int, 3)
    return x if dims == [first, second] else None
