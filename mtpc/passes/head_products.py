"""Products of a head's rows with that head's block of a weight, on packed blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit, emit_weight, is_call, refresh_values, sweep
from mtpc.passes.linears import weight_of
from mtpc.weights.packing import can_pack
from mtpc.weights.recipes import Blocks, Convert

aten = torch.ops.aten


def pack_head_products(graph: StepGraph) -> int:
    """Exchange `x^T @ part of W, head by head` for `mtpc::packed_head_linear`.

    Such are the two products that absorb-latent leaves beside the attention. As batched matrix
    products they would read the weight across its rows, and add in an order that depends on how
    many rows x has.

    Returns:
        How many products were exchanged.
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
    """The weight of such a product, and what of it each head takes, as rows [N, K]."""
    x, factor = node.args
    transposed = not _is_transpose(factor, 1, 2)
    part: Any = factor if transposed else factor.args[0]  # type: ignore[union-attr]
    if not (_is_transpose(x, 0, 1) and is_call(part, aten.slice.Tensor)):
        return None
    view, dim, start, stop = part.args
    if dim != 1 or not is_call(view, aten.view.default):
        return None
    weight = weight_of(graph, view.args[0])
    if weight is None or weight.dim() != 2 or not can_pack(weight) or x.meta["val"].shape[-1] % 2:  # type: ignore[union-attr]
        return None
    return view.args[0], Blocks(
        view.meta["val"].shape[0], start, stop, transposed, str(view.args[0].target)
    )


def _exchange(graph: StepGraph, node: fx.Node, weight: fx.Node, blocks: Blocks) -> None:
    x: Any = node.args[0]
    turned = "t" if blocks.transposed else "n"
    source = str(weight.target).replace(".", "_")
    name = f"packed.{source}_{blocks.count}x{blocks.start}to{blocks.stop}{turned}"
    with graph.graph.inserting_before(node):
        packed = emit_weight(graph, name, Convert("pack", blocks), weight)
        args = (x.args[0], packed, node.meta["val"].shape[-1])
        rows = emit(graph.graph, torch.ops.mtpc.packed_head_linear.default, args, node)
        again = emit(graph.graph, aten.transpose.int, (rows, 0, 1), node)
    for user in list(node.users):
        if _is_transpose(user, 0, 1):
            user.replace_all_uses_with(rows)
    node.replace_all_uses_with(again)


def _is_transpose(node: object, first: int, second: int) -> bool:
    return is_call(node, aten.transpose.int) and node.args[1:] == (first, second)  # type: ignore[attr-defined]
