"""The product of a linear layer in training, with a backward at the rate of its forward.

The gradient of a weight is a product whose left factor is transposed. oneDNN makes that at half its
rate in 16 bits. If the narrower factor is transposed in memory first, it is as fast as the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class LinearProduct(torch.autograd.Function):
    """x [T, I] and a weight [O, I] -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, weight_gradient(gradient, x) if ctx.needs_input_grad[1] else None


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient [T, O] and x [T, I] -> the gradient of a weight, [O, I]."""
    if x.shape[1] < gradient.shape[1]:
        return (x.T.contiguous() @ gradient).T
    return gradient.T.contiguous() @ x


class LinearProducts(TorchFunctionMode):
    """Within the block, linear layers of 16 bits multiply by `LinearProduct`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear or kwargs or args[1].dtype.itemsize != 2:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        out = LinearProduct.apply(x.flatten(0, -2).to(weight.dtype), weight)
        out = out.unflatten(0, x.shape[:-1])
        return out if not bias or bias[0] is None else out + bias[0]
