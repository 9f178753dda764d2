"""fuse-elementwise: norms, gated activations and rotary embeddings become one operator each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import mtpc.ops.fused
import mtpc.ops.packed  # noqa: F401  (these register the ops that this pass calls)
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, emit, is_call, refresh_values, sweep
from mtpc.passes.patterns import cast, either_way, is_narrow, operands
from mtpc.passes.rotary import match_rotary
from mtpc.weights.packing import TILE

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseElementwise:
    """Exchange chains of elementwise operators on bfloat16 rows for the ops of `mtpc.ops.fused`.

    Three chains make up nearly all that a layer does between linears and attention: a residual sum
    and its norm, silu(gate) * up, rotary angles applied to queries and keys. A compiler that fuses
    loops emits several for each, and rounds to bfloat16 in between one element at a time; a kernel
    passes once over each row, on one thread as long as that is worth no more. On by default on the
    cpu; there are such kernels for GPUs, too, but no fewer launches than Inductor leaves there.
    Rounding stays where the chains have it.
    """

    name: ClassVar[str] = "fuse-elementwise"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in list(graph.graph.nodes):
            for fuse in (_fuse_norm, _fuse_activation, _fuse_rotary):
                if fuse(graph.graph, node):
                    rewrites += 1
                    break
        if rewrites:
            sweep(graph)
            refresh_values(graph)
        return rewrites


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """A norm, together with the sum that it is taken of where that comes right before it."""
    norm = _match_norm(node)
    if norm is None:
        return False
    x, weight, epsilon, plus_one = norm
    added = _summands(x)
    if added is None:
        with graph.inserting_before(node):
            normed = emit(graph, torch.ops.mtpc.rms_norm.default, norm, node)
    else:
        # In the sum's place, so that all who read the sum read the operator's.
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
    """(x, weight, epsilon, plus_one) of a bfloat16 norm whose last operation this is."""
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
    """(x, epsilon) of wide(x) * rsqrt(mean(wide(x)^2) + epsilon), in float32."""
    for wide, inverse in either_way(node, aten.mul.Tensor):
        (shifted,) = operands(inverse, aten.rsqrt.default, 1)
        mean, epsilon = operands(shifted, aten.add.Tensor, 2)
        square, *over = operands(mean, aten.mean.dim, 3)
        x, squared = cast(wide), operands(square, aten.pow.Tensor_Scalar, 2)
        is_mean_square = squared == (wide, 2) and over == [[-1], True]
        if is_mean_square and isinstance(epsilon, float) and is_narrow(x):
            return (x, epsilon) if wide.meta["val"].dtype == torch.float32 else None
    return None


def _summands(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What x is the sum of, if both are rows like it, and the sum is not scaled."""
    left, right = operands(x, aten.add.Tensor, 2)
    shape = x.meta["val"].shape
    alike = all(is_narrow(term) and term.meta["val"].shape == shape for term in (left, right))
    return (left, right) if alike and not x.kwargs else None


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """silu(gate) * up where both are halves of one tensor."""
    for active, up in either_way(node, aten.mul.Tensor):
        (gate,) = operands(active, aten.silu.default, 1)
        both, *_ = operands(gate, aten.slice.Tensor, 4)
        if not is_narrow(both) or not is_narrow(node):
            continue
        half, odd = divmod(both.meta["val"].shape[-1], 2)
        if odd or gate.args != (both, -1, 0, half):
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
    """Append silu(gate) * up, with the linear that made them where it made nothing else."""
    linear, features = torch.ops.mtpc.packed_linear.default, both.meta["val"].shape[-1]
    if is_call(both, linear) and set(both.users) == halves and features % (2 * TILE) == 0:
        x, weight, _, *bias = both.args
        if not bias:
            args = (x, weight, features)
            return emit(graph, torch.ops.mtpc.packed_gated_linear.default, args, like)
    return emit(graph, torch.ops.mtpc.silu_and_mul.default, (both,), like)


def _fuse_rotary(graph: fx.Graph, node: fx.Node) -> bool:
    """Rotary angles of heads [1, heads, T, D]."""
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
    """Whether a node is a weight with one number for each feature of another."""
    is_weight = is_narrow(node) and node.op == "get_attr"
    return is_weight and node.meta["val"].shape == like.meta["val"].shape[-1:]
