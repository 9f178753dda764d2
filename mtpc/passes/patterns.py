"""What passes ask of a node that may be part of a chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mtpc.passes.base import is_call

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)


def operands(node: Any, target: Any, count: int) -> tuple[Any, ...]:
    """The positional operands of a call of an operator with so many; else as many None."""
    matches = is_call(node, target) and len(node.args) == count
    return node.args if matches else (None,) * count


def either_way(node: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    """Both orders of the operands of a call of a commutative operator."""
    left, right = operands(node, target, 2)
    return () if left is None else ((left, right), (right, left))


def cast(node: Any) -> Any:
    """What a cast casts."""
    return node.args[0] if is_call(node, *_CASTS) else None


def is_narrow(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16
