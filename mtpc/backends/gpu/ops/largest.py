"""The largest numbers of each row: routers choose experts by them, and greedy heads tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.traits import Traits, largest_of, operator

TOPK_WIDTH, TOPK_COUNT = 1024, 16
"""Limits of the kernels of `topk` and `group_topk`: row width and count. They find one number after
the other."""
LEAST_ROW_MAX = 8192
"""The least row width for which the kernel of `row_max` pays: it has several programs per row."""


def _chosen(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@operator(Traits("row", "compares", rows="x"), _chosen)
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


@operator(Traits("row", "compares", rows="x"), _chosen)
def group_topk(x: Tensor, count: int, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """`topk` among the best groups of each row: how DeepSeek-V3 limits a choice of experts
    (arXiv:2412.19437, section 2.1.2).

    A group is as good as the sum of its two largest numbers. All numbers of the other groups count
    as -inf.

    Args:
        x: [..., N], float32.
        count: 1 to N.
        groups: divides N into groups of at least two, side by side.
        kept: 1 to `groups`.

    Returns:
        As `topk`.
    """
    totals = topk(x.unflatten(-1, (groups, -1)), 2)[0].sum(-1)
    is_kept = torch.zeros_like(totals).scatter(-1, topk(totals, kept)[1], 1.0) != 0
    is_kept = is_kept.repeat_interleave(x.shape[-1] // groups, -1)
    return topk(x.masked_fill(~is_kept, -torch.inf), count)


@operator(Traits("row", "compares", rows="x", chooses=True), largest_of)
def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row, and where it is: the greedy choice from logits.

    `Tensor.max` of the last dimension. Of equal numbers the first is the largest, and not a number
    is larger than any number.

    Args:
        x: [..., N], floating point, N at least 1.

    Returns:
        The numbers, of x's dtype, and their places in the row, int64; [...] both.
    """
    values, places = x.max(-1)
    return values, places
