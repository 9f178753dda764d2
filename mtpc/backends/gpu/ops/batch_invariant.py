"""Products and sums of rows whose bits must not depend on how many rows there are.

These references say what is computed. PyTorch's own kernels choose tiles, and so the order of sums,
by the number of rows; kernels of these operators do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.traits import Traits, operator, with_features


@operator(Traits("row", "sums", rows="x"), lambda x, weight: with_features(x, weight.shape[-2]))
def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, or several of them.

    Args:
        x: [..., K], or [B, T, K] where the weight has B parts.
        weight: [N, K] or [B, N, K], of x's dtype.
        bias: [N], as above, or None.

    Returns:
        [..., N] or [B, T, N], of x's dtype.
    """
    out = torch.matmul(x, weight.mT)
    return out if bias is None else out + bias


@operator(Traits("row", "sums", rows="x"), lambda x: x.new_empty(x.shape[:-1], dtype=torch.float32))
def row_sum(x: Tensor) -> Tensor:
    """The sum of each row.

    Args:
        x: floating point [..., N].

    Returns:
        float32 [...].
    """
    return x.sum(-1, dtype=torch.float32)
