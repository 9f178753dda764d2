"""fuse-elementwise: norms, gated activations and rotary embeddings as one operator each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.ops.traits import traits_of
from mtpc.passes.base import GETITEM, Pass, aten, cast, either_way, emit, is_narrow, operands, tidy
from mtpc.passes.rotary import match_rotary
from mtpc.weights.packing import TILE


@dataclass(frozen=True)
class FuseElementwise(Pass, policy="backend"):
    """Replace chains of elementwise operators on bfloat16 rows by the ops of `mtpc.ops.fused`.

    Nearly all of a layer's work between linears and attention is three such chains: a residual sum
    with its norm, silu(gate) * up, and the rotary embedding of queries and keys. Inductor emits
    several loops for each, and rounds to bfloat16 between them one element at a time. A kernel
    passes over each row once, and uses more threads only if that pays. The kernels round at the
    same places as the chains. On by default on the cpu and on GPUs.
    """

    def apply(self, graph: StepGraph) -> int:
        fuses, nodes = (_fuse_norm, _fuse_activation, _fuse_rotary), list(graph.graph.nodes)
        return tidy(graph, sum(any(fuse(graph.graph, node) for fuse in fuses) for node in nodes))


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """Fuse a norm, with the residual sum that it reads if there is one; returns whether it did."""
    norm = _match_norm(node)
    if norm is None:
        return False
    x, weight, epsilon, plus_one = norm
    # The two terms of the sum x, if both have its shape and neither is scaled.
    left, right = operands(x, aten.add.Tensor, 2)
    shape = x.meta["val"].shape
    alike = all(is_narrow(term) and term.meta["val"].shape == shape for term in (left, right))
    added = (left, right) if alike else None
    if added is None:
        with graph.inserting_before(node):
            normed = emit(graph, torch.ops.mtpc.rms_norm.default, norm, node)
    else:
        # At the place of the sum, whose readers then read the operator's sum.
        if x < weight:
            x.prepend(weight)
        args = (*added, weight, epsilon, plus_one)
        with graph.inserting_before(x):
            both = emit(graph, torch.ops.mtpc.add_rms_norm.default, args, x)
            total, normed = (emit(graph, GETITEM, (both, i), x) for i in (0, 1))
        x.replace_all_uses_with(total)
    node.replace_all_uses_with(normed)
    return True


def _match_norm(node: fx.Node) -> tuple[fx.Node, fx.Node, float, bool] | None:
    """(x, weight, epsilon, plus_one) of the bfloat16 norm that ends at this node."""
    if not is_narrow(node):
        return None
    for weight, narrowed in either_way(node, aten.mul.Tensor):
        scaling = _match_scaling(cast(narrowed)) if is_narrow(narrowed) else None
        if scaling and _is_scale(weight, node):
            return (scaling[0], weight, scaling[1], False)
    for scaled, shifted in either_way(cast(node), aten.mul.Tensor):
        wide, one = operands(shifted, aten.add.Tensor, 2)
        weight, scaling = cast(wide), _match_scaling(scaled)
        if scaling and one == 1.0 and _is_scale(weight, node):
            return (scaling[0], weight, scaling[1], True)
    return None


def _match_scaling(node: Any) -> tuple[fx.Node, float] | None:
    """(x, epsilon) of x32 * rsqrt(mean(x32^2) + epsilon), where x32 is x in float32."""
    for wide, inverse in either_way(node, aten.mul.Tensor):
        (shifted,) = operands(inverse, aten.rsqrt.default, 1)
        mean, epsilon = operands(shifted, aten.add.Tensor, 2)
        square, *over = operands(mean, aten.mean.dim, 3)
        x, squared = cast(wide), operands(square, aten.pow.Tensor_Scalar, 2)
        is_mean_square = squared == (wide, 2) and over == [[-1], True]
        if is_mean_square and isinstance(epsilon, float) and is_narrow(x):
            return (x, epsilon) if wide.meta["val"].dtype == torch.float32 else None
    return None


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """Fuse silu(gate) * up if both are halves of one tensor; returns whether it did."""
    for active, up in either_way(node, aten.mul.Tensor):
        (gate,) = operands(active, aten.silu.default, 1)
        both, *first = operands(gate, aten.slice.Tensor, 4)
        if not is_narrow(both) or not is_narrow(node):
            continue
        half, odd = divmod(both.meta["val"].shape[-1], 2)
        if odd or first != [-1, 0, half]:
            continue
        if operands(up, aten.slice.Tensor, 4) == (both, -1, half, 2 * half):
            with graph.inserting_before(node):
                fused = _emit_activation(graph, both, {gate, up}, node)
            node.replace_all_uses_with(fused)
            return True
    return False


def _emit_activation(
    graph: fx.Graph, both: fx.Node, halves: set[fx.Node], like: fx.Node
) -> fx.Node:
    """Append silu(gate) * up, together with the linear before it if nothing else reads that."""
    features = both.meta["val"].shape[-1]
    gate = traits_of(both.target).gated
    if gate and set(both.users) == halves and features % (2 * TILE) == 0:
        gated = getattr(torch.ops.mtpc, gate).default
        shared = [one for one in gated._schema.arguments if not one.has_default_value()]
        args = operands(both, both.target, len(shared))
        if args[0] is not None:
            return emit(graph, gated, args, like)
    return emit(graph, torch.ops.mtpc.silu_and_mul.default, (both,), like)


def _fuse_rotary(graph: fx.Graph, node: fx.Node) -> bool:
    """Fuse the rotary embedding of heads [1, heads, T, D]; returns whether it did."""
    rotary = match_rotary(node)
    if rotary is None:
        return False
    last = rotary.last
    with graph.inserting_before(last):
        args = (rotary.emit_rows(graph), *rotary.emit_angles(graph))
        turned = emit(graph, torch.ops.mtpc.rotate.default, args, last)
        heads = emit(graph, aten.transpose.int, (turned, 0, 1), last)
        out = emit(graph, aten.unsqueeze.default, (heads, 0), last)
    last.replace_all_uses_with(out)
    return True


def _is_scale(node: Any, like: fx.Node) -> bool:
    """Whether a node is a bfloat16 weight with one value per feature of another node."""
    is_weight = is_narrow(node) and node.op == "get_attr"
    return is_weight and node.meta["val"].shape == like.meta["val"].shape[-1:]
