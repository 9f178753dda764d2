"""Linear layers with float32 results in models of 16 bits: the routers of mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("mtpc::float32_linear", mutates_args=())
def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, all in float32, of operands as they are stored.

    Widening 16 bits is exact, so that a weight stored in them need not be copied to float32 first.
    The cpu kernel adds each row up in an order of its own, whatever the rows beside it: F.linear
    does not, and a router whose logits move by a rounding may choose another expert.

    Args:
        x: [..., K], of 16 or 32 bits.
        weight: [N, K], of 16 or 32 bits.
        bias: [N].

    Returns:
        float32 [..., N].
    """
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


@float32_linear.register_fake
def fake_float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape and dtype of the result."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)
