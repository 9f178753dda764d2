"""The largest numbers of each row: what a mixture's router chooses experts by."""

from __future__ import annotations

import torch
from torch import Tensor

TOPK_WIDTH, TOPK_COUNT = 1024, 16
"""The widest rows of `topk`, and the most that it finds: it looks for one after the other."""


@torch.library.custom_op("mtpc::topk", mutates_args=())
def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each row, the largest first.

    `torch.topk` of the last dimension, but the choice among equal numbers is defined: of equals the
    first is chosen first. -0.0 and 0.0 are equal. As in torch, not a number is larger than any
    number.

    Args:
        x: [..., N], floating point.
        count: 1 to N.

    Returns:
        The numbers, of x's dtype, and their places in the row, int64; [..., count] both.
    """
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count].contiguous(), places[..., :count].contiguous()


@topk.register_fake
def _(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
