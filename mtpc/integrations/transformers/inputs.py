"""What transformers has prepared for a decoding loop, checked, as ragged prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import RequestError

OF_THE_HOST = (
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
)
"""Model arguments that say how transformers runs its forward; which fields are refused, `fields`
says."""

ENCODED = "mm_encoder_outputs"
"""What the encoders of a multimodal model gave; empty where there was text alone."""


def padding_lengths(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Padding at the left of each row, int64 [rows], on the CPU.

    Args:
        input_ids: int64 [rows, length].
        mask: [rows, length], nonzero where a token is; None: everywhere.

    Raises:
        RequestError: the mask has another shape, leaves nothing of a row, or is other than zeros
            and then ones.
    """
    if mask is None:
        return torch.zeros(input_ids.shape[0], dtype=torch.int64)
    if mask.shape != input_ids.shape:
        raise RequestError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}; "
            "expected the same"
        )
    present = (mask != 0).cpu()
    padding = (~present).sum(1)
    columns = torch.arange(present.shape[1])
    odd = (present != (columns >= padding[:, None])).any(1) | (padding == present.shape[1])
    if odd.any():
        row = int(odd.nonzero()[0])
        raise RequestError(
            f"row {row} of attention_mask is {present[row].int().tolist()}; expected zeros and "
            "then ones: pad on the left (padding_side='left')"
        )
    return padding


def check_model_arguments(arguments: Mapping[str, Any], padding: Tensor) -> None:
    """Refuse arguments of the model's forward that the step would have to know of.

    Args:
        arguments: what is left of `generate`'s, the attention mask taken out.
        padding: int64 [rows].

    Raises:
        RequestError: one of them is not what transformers makes by itself.
    """
    for name, value in arguments.items():
        if value is None or name in OF_THE_HOST or (name == ENCODED and not value):
            continue
        if name == "past_key_values":
            if getattr(value, "_is_user_defined", False) or value.get_seq_length() > 0:
                raise RequestError(
                    "past_key_values was given; the step has memory of its own: give the whole "
                    "text as input_ids (its beginning is reused, see docs/engine.md)"
                )
        elif name == "position_ids":
            _check_positions(value, padding)
        else:
            raise RequestError(
                f"the argument {name!r} is not supported; mtpc takes input_ids and attention_mask"
            )


def _check_positions(positions: Tensor, padding: Tensor) -> None:
    """Each row's tokens count from 0; what padding has is never looked at."""
    columns = torch.arange(positions.shape[-1])
    expected = columns - padding[:, None]
    # One row may stand for all, and grids come first.
    rows = positions.cpu().expand(*positions.shape[:-2], *expected.shape)
    if ((rows != expected) & (expected >= 0)).any():
        raise RequestError(
            "position_ids are not those of the tokens in order; mtpc numbers each row from 0"
        )


def ragged_prompts(input_ids: Tensor, padding: Tensor) -> list[list[int]]:
    """Each row's ids without its padding."""
    rows = input_ids.tolist()
    return [row[skip:] for row, skip in zip(rows, padding.tolist(), strict=True)]
