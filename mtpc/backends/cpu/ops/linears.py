"""Linear layers in float32 (routers), the largest feature of one on a weight in groups, and rows of
results that are not in use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.grouped import grouped_linear
from mtpc.ops.ragged import keep_rows
from mtpc.ops.traits import Traits, largest_of, operator


@operator(
    Traits("row", "sums", rows="x"),
    lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
)
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


@operator(Traits("row", "sums", rows="x"), largest_of)
def grouped_linear_max(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    features: int,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest feature of `grouped_linear` of bfloat16 x; else as `packed_linear_max`."""
    values, indices = grouped_linear(x, codes, scales, zeros, features, bias, rows).max(-1)
    return values, indices


@operator(Traits("row", "moves", rows="x"), mutates_args=("x",))
def clear_idle_rows(x: Tensor, rows: Tensor, features: int) -> None:
    """Write zeros to rows of x [..., F...], dense, that are not in use: `rows`, int32 or int64 [1],
    says how many leading ones are. A row has the last `features` dimensions."""
    lead = x.shape[: x.dim() - features]
    flat = x.view(lead.numel(), -1)
    flat.copy_(keep_rows(flat, rows))
