"""What passes ask of a node that may be part of a chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mtpc.capture.graph import arguments, first_argument
from mtpc.passes.base import is_call

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)


def operands(node: Any, target: Any, count: int) -> tuple[Any, ...]:
    """The first arguments of a call of an operator, if all others are at their defaults.

    Args:
        node: anything.
        target: the operator overload.
        count: how many arguments to return, in the schema's order, defaults filled in.

    Returns:
        The arguments; as many None for any other node, and for a call with another argument set.
    """
    values = list(arguments(node).values()) if is_call(node, target) else []
    rest = target._schema.arguments[count:]
    is_plain = all(v == a.default_value for v, a in zip(values[count:], rest, strict=False))
    return tuple(values[:count]) if values and is_plain else (None,) * count


def either_way(node: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    """Both orders of the operands of a call of a commutative operator."""
    left, right = operands(node, target, 2)
    return () if left is None else ((left, right), (right, left))


def cast(node: Any) -> Any:
    """What a cast casts, if it changes the dtype only."""
    if not is_call(node, *_CASTS):
        return None
    source = first_argument(node)
    before, after = source.meta["val"], node.meta["val"]
    moves = before.device != after.device or before.layout != after.layout
    return None if moves else source


def is_narrow(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16
