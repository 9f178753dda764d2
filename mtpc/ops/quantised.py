"""Linear layers on int8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.ragged import keep_rows
from mtpc.packing import LARGEST, ZERO, unpack


@torch.library.custom_op("mtpc::quantised_linear", mutates_args=())
def quantised_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T + bias, W with one scale a row; x is rounded to int8 with one scale a row, too.

    Sums of products are exact integers. (Dettmers et al., LLM.int8(), arXiv:2208.07339, without
    its outlier columns.)

    Args:
        x: floating point [..., K].
        weight: uint8 [ceil(N / 32), K / 4, 32, 4], as `mtpc.packing.quantise` makes it.
        scales: float32 [N], as `mtpc.packing.row_scales` makes them.
        bias: [N].
        rows: as in `packed_linear`.

    Returns:
        [..., N], of x's dtype.
    """
    numbers = x.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # Divided as the kernel does: a number over a tensor would be multiplied by its reciprocal.
    inverse = torch.full_like(largest, LARGEST) / largest
    integers = torch.round(numbers * torch.where(largest == 0, 0.0, inverse))
    wide = unpack(weight, scales.shape[0]).double() - ZERO
    # Exact: integers below 2^53.
    sums = (integers.double() @ wide.t()).float()
    out = sums * (largest / LARGEST * scales)
    return keep_rows((out if bias is None else out + bias.float()).to(x.dtype), rows)


@quantised_linear.register_fake
def fake_quantised_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Shape and dtype of the result."""
    return x.new_empty((*x.shape[:-1], scales.shape[0]))
