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
    if is_call(node, aten.mul.Tensor):
        for weight, normed in (node.args, node.args[::-1]):
            match = _match_scaling(normed) if is_call(normed, *_CASTS) else None
            if match and _is_scale(weight, node):
                return (match[0], weight, match[1], False)  # type: ignore[return-value]
    elif is_call(node, *_CASTS) and is_call(node.args[0], aten.mul.Tensor):
        product: Any = node.args[0]
        for scaled, scale in (product.args, product.args[::-1]):
            weight = _plus_one(scale)
            match = _match_scaling_of(scaled) if weight is not None else None
            if match and _is_scale(weight, node):
                return (match[0], weight, match[1], True)  # type: ignore[return-value]
    return None


def _match_scaling(cast: Any) -> tuple[fx.Node, float] | None:
    """(x, epsilon) of x over its root mean square, rounded to x's dtype."""
    return _match_scaling_of(cast.args[0]) if _is_narrow(cast) else None


def _match_scaling_of(node: Any) -> tuple[fx.Node, float] | None:
    """(x, epsilon) of wide(x) * rsqrt(mean(wide(x)^2) + epsilon), in float32."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for wide, inverse in (node.args, node.args[::-1]):
        if not (is_call(inverse, aten.rsqrt.default) and is_call(wide, *_CASTS)):
            continue
        shifted = inverse.args[0]
        if not (is_call(shifted, aten.add.Tensor) and isinstance(shifted.args[1], float)):
            continue
        mean = shifted.args[0]
        if not (is_call(mean, aten.mean.dim) and mean.args[1:] == ([-1], True)):
            continue
        is_square = is_call(mean.args[0], aten.pow.Tensor_Scalar) and mean.args[0].args == (wide, 2)
        if is_square and wide.meta["val"].dtype == torch.float32 and _is_narrow(wide.args[0]):
            return wide.args[0], shifted.args[1]
    return None


def _plus_one(node: Any) -> fx.Node | None:
    """The weight of 1 + wide(weight)."""
    if not (is_call(node, aten.add.Tensor) and node.args[1] == 1.0):
        return None
    wide = node.args[0]
    return wide.args[0] if is_call(wide, *_CASTS) and _is_narrow(wide.args[0]) else None


def _summands(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What x is the sum of, if both are rows like it, and the sum is not scaled."""
    if not is_call(x, aten.add.Tensor) or len(x.args) != 2 or x.kwargs:
        return None
    shape = x.meta["val"].shape
    alike = all(
        isinstance(term, fx.Node) and _is_narrow(term) and term.meta["val"].shape == shape
        for term in x.args
    )
    return x.args if alike else None  # type: ignore[return-value]


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """silu(gate) * up where both are halves of one tensor."""
    if not is_call(node, aten.mul.Tensor) or not _is_narrow(node):
        return False
    for active, up in (node.args, node.args[::-1]):
        gate = active.args[0] if is_call(active, aten.silu.default) else None  # type: ignore[union-attr]
        both = _halves(gate, up)
        if both is None:
            continue
        with graph.inserting_before(node):
            fused = emit(graph, torch.ops.mtpc.silu_and_mul.default, (both,), node)
        node.replace_all_uses_with(fused)
        return True
    return False


def _halves(gate: Any, up: Any) -> fx.Node | None:
    """The tensor whose first half one is, and whose second the other."""
    if not (is_call(gate, aten.slice.Tensor) and is_call(up, aten.slice.Tensor)):
        return None
    both = gate.args[0]
    width = both.meta["val"].shape[-1]
    wanted = ((both, -1, 0, width // 2), (both, -1, width // 2, width))
    return both if width % 2 == 0 and (gate.args, up.args) == wanted else None


def _fuse_rotary(graph: fx.Graph, node: fx.Node) -> bool:
    """x cos + rotate_half(x) sin of x [1, heads, T, D], and the features behind that stay."""
    rotary = _match_rotary(node)
    if rotary is None:
        return False
    x, cos, sin = rotary
    whole = _whole_head(node, x)
    last, x = (node, x) if whole is None else whole
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
    if not is_call(node, aten.add.Tensor) or not _is_narrow(node) or len(node.args) != 2:
        return None
    plain, across = node.args
    if not (is_call(plain, aten.mul.Tensor) and is_call(across, aten.mul.Tensor)):
        return None
    x, cos = plain.args  # type: ignore[union-attr]
    turned, sin = across.args  # type: ignore[union-attr]
    if not all(isinstance(n, fx.Node) and _is_narrow(n) for n in (x, cos, sin)):
        return None
    shape = node.meta["val"].shape
    angles = (1, 1, *shape[2:])
    is_row = len(shape) == 4 and shape[0] == 1 and x.meta["val"].shape == shape
    alike = is_row and all(a.meta["val"].shape == angles for a in (cos, sin))
    return (x, cos, sin) if alike and _is_half_turn(turned, x) else None


def _is_half_turn(node: Any, x: fx.Node) -> bool:
    """Whether a node is cat(-second half of x, first half of x)."""
    if not is_call(node, aten.cat.default) or node.args[1:] != (-1,) or len(node.args[0]) != 2:
        return False
    negated, first = node.args[0]
    half, odd = divmod(x.meta["val"].shape[-1], 2)
    return (
        not odd
        and is_call(negated, aten.neg.default)
        and is_call(negated.args[0], aten.slice.Tensor)
        and negated.args[0].args == (x, 3, half, _END)
        and is_call(first, aten.slice.Tensor)
        and first.args == (x, 3, 0, half)
    )


def _whole_head(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(cat, head) where x is the first part of a head, and the rest is put behind it again."""
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], aten.cat.default):
        return None
    parts, width = users[0].args[0], x.meta["val"].shape[-1]
    if users[0].args[1:] != (-1,) or len(parts) != 2 or parts[0] is not node:  # type: ignore[arg-type,index,union-attr]
        return None
    rest = parts[1]  # type: ignore[index,union-attr]
    if not (is_call(x, aten.slice.Tensor) and is_call(rest, aten.slice.Tensor)):
        return None
    head = x.args[0]
    if x.args != (head, 3, 0, width) or rest.args != (head, 3, width, _END):  # type: ignore[union-attr]
        return None
    return users[0], head  # type: ignore[return-value]


def _is_narrow(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _is_scale(node: Any, like: fx.Node) -> bool:
    """Whether a node is a weight with one number for each feature of another."""
    is_weight = isinstance(node, fx.Node) and node.op == "get_attr" and _is_narrow(node)
    return is_weight and node.meta["val"].shape == like.meta["val"].shape[-1:]
