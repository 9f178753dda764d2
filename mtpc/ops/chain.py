"""Linear layers and norms in a row, as one operator: all that is between two attentions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mtpc.ops.fused import add_rms_norm
from mtpc.ops.packed import packed_gated_linear, packed_linear
from mtpc.weights.packing import TILE

LINEAR, BIASED, GATED, NORM, NORM_PLUS_ONE = "LBGNP"
"""Kinds of stages: `packed_linear` without and with a bias, `packed_gated_linear`, `add_rms_norm`
without and with `plus_one`."""


def _stages(kinds: str, operands: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Kind, weight and bias of each stage."""
    count = len(kinds) + kinds.count(BIASED)
    known = set(kinds) <= {LINEAR, BIASED, GATED, NORM, NORM_PLUS_ONE}
    if not known or not {NORM, NORM_PLUS_ONE} & set(kinds) or len(operands) != count:
        raise ValueError(
            f"mtpc::linear_chain: expected stages of L, B, G, N and P, an N or P among them, and "
            f"{count} operands; found {kinds!r} and {len(operands)}"
        )
    following = iter(operands)
    for kind in kinds:
        yield kind, next(following), next(following) if kind == BIASED else None


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
        operands: of each stage its weight, as its operator takes it (packed
            [features / 32, inputs / 2, 32, 2], or [N] of a norm), after it the bias [features] if
            it has one. Gated layers have a multiple of 64 features, before a norm there are N.
        epsilon: of all norms.
        rows: int32 or int64 [1], how many leading rows are in use; what the others give is not
            said (`mtpc.ops.ragged.clear_idle_rows`).

    Returns:
        The residual stream behind the last norm, [..., N]; and what the last stage gives, [..., M].

    Raises:
        ValueError: an unknown kind, no norm, or too few or many operands.
    """
    for kind, weight, bias in _stages(kinds, operands):
        if kind in (NORM, NORM_PLUS_ONE):
            plus_one = kind == NORM_PLUS_ONE
            residual, x = add_rms_norm(residual, x, weight, epsilon, plus_one, rows)
        elif kind == GATED:
            x = packed_gated_linear(x, weight, weight.shape[0] * TILE, rows)
        else:
            x = packed_linear(x, weight, weight.shape[0] * TILE, bias, rows)
    return residual, x


@linear_chain.register_fake
def fake_linear_chain(
    x: Tensor, residual: Tensor, kinds: str, operands: Sequence[Tensor], *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    width = x.shape[-1]
    for kind, weight, _bias in _stages(kinds, operands):
        features = weight.shape[0] * TILE
        if kind == GATED:
            width = features // 2
        elif kind in (LINEAR, BIASED):
            width = features
    return residual.new_empty(residual.shape), x.new_empty((*x.shape[:-1], width))
