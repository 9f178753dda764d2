"""Products of training at oneDNN's full rate: of linear layers, and of experts.

The gradient of a weight is a product whose left factor is transposed. oneDNN makes that at half its
rate in 16 bits. If the narrower factor is transposed in memory first, it is as fast as the others.

oneDNN compiles a kernel for each new shape. The number of rows of an expert changes in every step,
and without padding compilation takes a third of a small model's training time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROUNDED_EXPERTS = "mtpc_rounded"
"""The name under which transformers knows `rounded_experts`."""
_ROWS = 64


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


def rounded_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute what transformers' own forward of an experts module computes, with gradients.

    Each expert's rows are padded to a multiple of 64. Takes hidden [T, H], ids of each token's
    experts, int64 [T, k], and their weights [T, k]; returns [T, H].
    """
    if module.has_bias or module.is_transposed or not module.has_gate:
        own: Tensor = type(module).forward.__wrapped__(module, hidden, chosen, weights)
        return own
    out = torch.zeros_like(hidden)
    pairs = zip(module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True)
    for expert, (gate_up, down) in enumerate(pairs):
        token, choice = torch.where(chosen == expert)
        if not len(token):
            continue
        rows = functional.pad(hidden[token], (0, 0, 0, -len(token) % _ROWS))
        gated = module._apply_gate(functional.linear(rows, gate_up))
        found = functional.linear(gated, down)[: len(token)]
        out.index_add_(0, token, (found * weights[token, choice, None]).to(out.dtype))
    return out
