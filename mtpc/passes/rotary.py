"""Matching rotary embeddings in a graph, as transformers writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from mtpc.passes.base import aten, emit, is_narrow, operands

_END = 2**63 - 1
"""The end of a slice that has none."""


@dataclass(frozen=True)
class Rotary:
    """x cos + rotate_half(x) sin for the first C features x of each head; other features stay.
    `heads` is the node of the input and `last` that of the result, [1, heads, T, D]; cos and sin
    are [1, 1, T, C]."""

    last: fx.Node
    heads: fx.Node
    cos: fx.Node
    sin: fx.Node

    def emit_rows(self, graph: fx.Graph) -> fx.Node:
        """Append nodes that give the input heads as [T, heads, D]."""
        row = emit(graph, aten.select.int, (self.heads, 0, 0), self.last)
        return emit(graph, aten.transpose.int, (row, 0, 1), self.last)

    def emit_angles(self, graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
        """Append nodes that give cos and sin, each [T, C]."""
        cos, sin = (self._emit_table(graph, angles) for angles in (self.cos, self.sin))
        return cos, sin

    def _emit_table(self, graph: fx.Graph, angles: fx.Node) -> fx.Node:
        row = emit(graph, aten.select.int, (angles, 0, 0), self.last)
        return emit(graph, aten.select.int, (row, 0, 0), self.last)


def rows_of(node: Any) -> Any:
    """The heads that `Rotary.emit_rows` turned into this node, or None."""
    row, *swapped = operands(node, aten.transpose.int, 3)
    heads, *chosen = operands(row, aten.select.int, 3)
    return heads if swapped == [0, 1] and chosen == [0, 0] else None


def match_rotary(node: fx.Node) -> Rotary | None:
    """The bfloat16 rotary embedding that ends in this sum, or None."""
    plain, across = operands(node, aten.add.Tensor, 2)
    x, cos = operands(plain, aten.mul.Tensor, 2)
    turned, sin = operands(across, aten.mul.Tensor, 2)
    if not all(is_narrow(n) for n in (node, x, cos, sin)):
        return None
    shape = node.meta["val"].shape
    if len(shape) != 4 or shape[0] != 1 or x.meta["val"].shape != shape:
        return None
    angles = (1, 1, *shape[2:])
    if any(a.meta["val"].shape != angles for a in (cos, sin)) or not _is_rotated_half(turned, x):
        return None
    last, heads = _whole_head(node, x)
    return Rotary(last, heads, cos, sin)


def _is_rotated_half(node: Any, x: fx.Node) -> bool:
    """Whether a node is rotate_half(x): cat(-second half of x, first half of x)."""
    parts, dim = operands(node, aten.cat.default, 2)
    half, odd = divmod(x.meta["val"].shape[-1], 2)
    if dim != -1 or len(parts) != 2 or odd:
        return False
    (second,) = operands(parts[0], aten.neg.default, 1)
    return (
        operands(second, aten.slice.Tensor, 4) == (x, 3, half, _END)
        and operands(parts[1], aten.slice.Tensor, 4) == (x, 3, 0, half)
    )  # fmt: skip


def _whole_head(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(result, input) of a rotary embedding of whole heads.

    transformers may slice the first features x off the head, rotate them, and concatenate the rest
    of the head again, even if that is empty. Then the result is the concatenation and the input is
    the head. Otherwise they are `node` and `x`.
    """
    width = x.meta["val"].shape[-1]
    whole, *first = operands(x, aten.slice.Tensor, 4)
    head = whole if first == [3, 0, width] else x
    users = list(node.users)
    parts, dim = operands(users[0], aten.cat.default, 2) if len(users) == 1 else (None, None)
    if dim != -1 or len(parts) != 2 or parts[0] is not node:
        return node, x
    is_rest = operands(parts[1], aten.slice.Tensor, 4) == (head, 3, width, _END)
    return (users[0], head) if is_rest else (node, x)
