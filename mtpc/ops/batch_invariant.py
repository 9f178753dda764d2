"""Products and sums of rows whose bits must not depend on how many rows there are.

These references say what is computed. PyTorch's own kernels choose tiles, and so the order of sums,
by the number of rows; kernels of these operators do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.traits import Traits, operator


@operator(Traits("row", "sums", rows="x"))
def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, or several of them.

    Args:
        x: [..., K], or [B, T, K] where the weight has B parts.
        weight: [N, K] or [B, N, K], of x's dtype.
        bias: [N], likewise, or None.

    Returns:
        [..., N] or [B, T, N], of x's dtype.
    """
    out = torch.matmul(x, weight.mT)
    return out if bias is None else out + bias


@batch_invariant_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-2]))


@operator(Traits("row", "sums", rows="x"))
def row_sum(x: Tensor) -> Tensor:
    """The sum of each row.

    Args:
        x: floating point [..., N].

    Returns:
        float32 [...].
    """
    return x.sum(-1, dtype=torch.float32)


@row_sum.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(Traits("row", "sums", rows="x"))
def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, computed in float32 from operands as they are stored: routers in 16-bit models.

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
