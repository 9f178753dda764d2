"""Linear layers and norms in a row, as one operator: all that is between two attentions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpc.ops.fused import add_rms_norm
from mtpc.ops.packed import packed_gated_linear, packed_linear
from mtpc.packing import TILE

LINEAR, BIASED, GATED, NORM, NORM_PLUS_ONE = "LBGNP"
"""Kinds of stages: `packed_linear` without and with a bias, `packed_gated_linear`, `add_rms_norm`
without and with `plus_one`."""


@torch.library.custom_op("mtpc::linear_chain", mutates_args=())
def linear_chain(
    x: Tensor,
    residual: Tensor,
    kinds: str,
    operands: Sequence[Tensor],
    epsilon: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each stage reads what the one before it gave; a norm adds it to the residual stream first.

    Args:
        x: bfloat16 [..., K].
        residual: bfloat16 [..., N], as many rows.
        kinds: one of `LINEAR`, `BIASED`, `GATED`, `NORM` and `NORM_PLUS_ONE` for each stage.
        operands: of each stage its weight, as its operator takes it, after it the bias if it has
            one. Linear layers have a multiple of 32 features, gated ones of 64.
        epsilon: of all norms.
        rows: int32 or int64 [1], how many leading rows are in use; what the others give is not
            said (`mtpc.ops.ragged.clear_idle_rows`).

    Returns:
        The residual stream behind the last norm, [..., N]; and what the last stage gives.
    """
    following = iter(operands)
    for kind in kinds:
        weight = next(following)
        if kind in (NORM, NORM_PLUS_ONE):
            plus_one = kind == NORM_PLUS_ONE
            residual, x = add_rms_norm(residual, x, weight, epsilon, plus_one, rows)
        elif kind == GATED:
            x = packed_gated_linear(x, weight, weight.shape[0] * TILE, rows)
        else:
            bias = next(following) if kind == BIASED else None
            x = packed_linear(x, weight, weight.shape[0] * TILE, bias, rows)
    return residual, x


@linear_chain.register_fake
def fake_linear_chain(
    x: Tensor,
    residual: Tensor,
    kinds: str,
    operands: Sequence[Tensor],
    epsilon: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    following = iter(operands)
    width = x.shape[-1]
    for kind in kinds:
        features = next(following).shape[0] * TILE
        if kind == BIASED:
            next(following)
        if kind == GATED:
            width = features // 2
        elif kind in (LINEAR, BIASED):
            width = features
    return residual.new_empty(residual.shape), x.new_empty((*x.shape[:-1], width))
