"""Rows of results that are not in use."""

from __future__ import annotations

from torch import Tensor

from mtpc.ops.ragged import keep_rows
from mtpc.ops.traits import Traits, operator


@operator(Traits("row", "moves", rows="x"), mutates_args=("x",))
def clear_idle_rows(x: Tensor, rows: Tensor, features: int) -> None:
    """Write zeros to rows that are not in use.

    Args:
        x: [..., F...], dense.
        rows: int32 or int64 [1], how many leading rows are in use.
        features: how many last dimensions a row has.
    """
    lead = x.shape[: x.dim() - features]
    flat = x.view(lead.numel(), -1)
    flat.copy_(keep_rows(flat, rows))
