"""The entry of an MTP layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.fused import rms_norm
from mtpc.ops.traits import Traits, operator, with_features


@operator(
    Traits("row", "sums", rows="left right"), lambda left: with_features(left, 2 * left.shape[-1])
)
def draft_entry(
    left: Tensor,
    left_weight: Tensor,
    right: Tensor,
    right_weight: Tensor,
    epsilon: float,
    plus_one: bool = False,
) -> Tensor:
    """The input of an MTP layer's projection: the norms of an embedding and of a hidden state, side
    by side, in the order of the model family.

    Args:
        left: [..., N], of 16 bits.
        left_weight: as in `rms_norm`.
        right: as left.
        right_weight: as left_weight.
        epsilon: as there, for both.
        plus_one: as there, for both.

    Returns:
        [..., 2N], left's norm first.
    """
    halves = ((left, left_weight), (right, right_weight))
    return torch.cat([rms_norm(x, weight, epsilon, plus_one) for x, weight in halves], -1)
