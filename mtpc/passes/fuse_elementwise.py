"""fuse-elementwise: norms, gated activations and rotary embeddings become one operator each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

import mtpc.ops.fused  # noqa: F401  (registers the ops that this pass calls)
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, emit, is_call, refresh_values, sweep

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
_END = 2**63 - 1
"""Where a slice ends that takes all that is left."""


@dataclass(frozen=True)
class FuseElementwise:
    """Exchange chains of elementwise operators on bfloat16 rows for the ops of `mtpc.ops.fused`.

    Three chains make up nearly all that a layer does between linears and attention: a residual sum
    and its norm, silu(gate) * up, rotary angles applied to queries and keys. A compiler that fuses
    loops emits several for each, and rounds to bfloat16 in between one element at a time; a kernel
    passes once over each row, on one thread as long as that is worth no more. On by default where
    the backend has such kernels (cpu). Rounding stays where the chains have it.
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
    if not _is_narrow(node):
        return None
    for weight, cast in _either_way(node, aten.mul.Tensor):
        scaling = _match_scaling(_cast(cast)) if _is_narrow(cast) else None
        if scaling and _is_scale(weight, node):
            return (scaling[0], weight, scaling[1], False)
    for scaled, shifted in _either_way(_cast(node), aten.mul.Tensor):
        wide, one = _operands(shifted, aten.add.Tensor, 2)
        weight, scaling = _cast(wide), _match_scaling(scaled)
        if scaling and one == 1.0 and _is_scale(weight, node):
            return (scaling[0], weight, scaling[1], True)
    return None


def _match_scaling(node: Any) -> tuple[fx.Node, float] | None:
    """(x, epsilon) of wide(x) * rsqrt(mean(wide(x)^2) + epsilon), in float32."""
    for wide, inverse in _either_way(node, aten.mul.Tensor):
        (shifted,) = _operands(inverse, aten.rsqrt.default, 1)
        mean, epsilon = _operands(shifted, aten.add.Tensor, 2)
        square, *over = _operands(mean, aten.mean.dim, 3)
        x, squared = _cast(wide), _operands(square, aten.pow.Tensor_Scalar, 2)
        is_mean_square = squared == (wide, 2) and over == [[-1], True]
        if is_mean_square and isinstance(epsilon, float) and _is_narrow(x):
            return (x, epsilon) if wide.meta["val"].dtype == torch.float32 else None
    return None


def _summands(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What x is the sum of, if both are rows like it, and the sum is not scaled."""
    left, right = _operands(x, aten.add.Tensor, 2)
    shape = x.meta["val"].shape
    alike = all(_is_narrow(term) and term.meta["val"].shape == shape for term in (left, right))
    return (left, right) if alike and not x.kwargs else None


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """silu(gate) * up where both are halves of one tensor."""
    for active, up in _either_way(node, aten.mul.Tensor):
        (gate,) = _operands(active, aten.silu.default, 1)
        both, *_ = _operands(gate, aten.slice.Tensor, 4)
        if not _is_narrow(both) or not _is_narrow(node):
            continue
        half, odd = divmod(both.meta["val"].shape[-1], 2)
        if odd or gate.args != (both, -1, 0, half):
            continue
        if _operands(up, aten.slice.Tensor, 4) == (both, -1, half, 2 * half):
            with graph.inserting_before(node):
                fused = emit(graph, torch.ops.mtpc.silu_and_mul.default, (both,), node)
            node.replace_all_uses_with(fused)
            return True
    return False


def _fuse_rotary(graph: fx.Graph, node: fx.Node) -> bool:
    """x cos + rotate_half(x) sin of x [1, heads, T, D], and the features behind that stay."""
    rotary = _match_rotary(node)
    if rotary is None:
        return False
    x, cos, sin = rotary
    last, x = _whole_head(node, x)

    def then(target: Any, *args: Any) -> fx.Node:
        return emit(graph, target, args, last)

    with graph.inserting_before(last):
        rows = then(aten.transpose.int, then(aten.select.int, x, 0, 0), 0, 1)
        angles = [then(aten.select.int, then(aten.select.int, a, 0, 0), 0, 0) for a in (cos, sin)]
        turned = then(torch.ops.mtpc.rotate.default, rows, *angles)
        out = then(aten.unsqueeze.default, then(aten.transpose.int, turned, 0, 1), 0)
    last.replace_all_uses_with(out)
    return True


def _match_rotary(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin), x [1, heads, T, C] and the others [1, 1, T, C], all bfloat16."""
    plain, across = _operands(node, aten.add.Tensor, 2)
    x, cos = _operands(plain, aten.mul.Tensor, 2)
    turned, sin = _operands(across, aten.mul.Tensor, 2)
    if not all(_is_narrow(n) for n in (node, x, cos, sin)):
        return None
    shape = node.meta["val"].shape
    if len(shape) != 4 or shape[0] != 1 or x.meta["val"].shape != shape:
        return None
    angles = (1, 1, *shape[2:])
    alike = all(a.meta["val"].shape == angles for a in (cos, sin))
    return (x, cos, sin) if alike and _is_half_turn(turned, x) else None


def _is_half_turn(node: Any, x: fx.Node) -> bool:
    """Whether a node is cat(-second half of x, first half of x)."""
    parts, dim = _operands(node, aten.cat.default, 2)
    half, odd = divmod(x.meta["val"].shape[-1], 2)
    if dim != -1 or len(parts) != 2 or odd:
        return False
    (second,) = _operands(parts[0], aten.neg.default, 1)
    return (
        _operands(second, aten.slice.Tensor, 4) == (x, 3, half, _END)
        and _operands(parts[1], aten.slice.Tensor, 4) == (x, 3, 0, half)
    )  # fmt: skip


def _whole_head(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(last operation, heads): where x is only the first part of a head, and the rest of it is put
    behind it again, that and the head; else node and x."""
    width = x.meta["val"].shape[-1]
    head, *first = _operands(x, aten.slice.Tensor, 4)
    users = list(node.users)
    if first != [3, 0, width] or len(users) != 1:
        return node, x
    parts, dim = _operands(users[0], aten.cat.default, 2)
    if dim != -1 or len(parts) != 2 or parts[0] is not node:
        return node, x
    is_whole = _operands(parts[1], aten.slice.Tensor, 4) == (head, 3, width, _END)
    return (users[0], head) if is_whole else (node, x)


def _operands(node: Any, target: Any, count: int) -> tuple[Any, ...]:
    """The positional operands of a call of an operator with so many; else as many None."""
    matches = is_call(node, target) and len(node.args) == count
    return node.args if matches else (None,) * count


def _either_way(node: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    """Both orders of the operands of a call of a commutative operator."""
    left, right = _operands(node, target, 2)
    return () if left is None else ((left, right), (right, left))


def _cast(node: Any) -> Any:
    """What a cast casts."""
    return node.args[0] if is_call(node, *_CASTS) else None


def _is_narrow(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _is_scale(node: Any, like: fx.Node) -> bool:
    """Whether a node is a weight with one number for each feature of another."""
    is_weight = _is_narrow(node) and node.op == "get_attr"
    return is_weight and node.meta["val"].shape == like.meta["val"].shape[-1:]
