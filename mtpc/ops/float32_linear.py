"""Linear layers with float32 results in models of 16 bits: the routers of mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("mtpc::float32_linear", mutates_args=())
def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, computed in float32 from operands as they are stored.

    Widening 16 bits is exact, so a weight that is stored in 16 bits need not be copied to float32.
    The cpu kernel sums each row in an order that does not depend on the other rows. F.linear does
    not, and a router whose logits differ by a rounding may choose another expert.

    Args:
        x: [..., K], of 16 or 32 bits.
        weight: [N, K], of 16 or 32 bits.
        bias: [N].

    Returns:
        float32 [..., N].
    """
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


@float32_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)
