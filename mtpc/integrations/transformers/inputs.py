"""Checks the arguments that transformers prepares for a decoding loop."""

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
"""Model arguments that only concern transformers' own forward. `fields.py` checks the generation
config."""

CACHES = ("cache", "past_key_values")
"""The KV cache: its name since transformers 5.24, and its name before."""

ENCODED = "mm_encoder_outputs"
"""The outputs of a multimodal model's encoders. They are empty for a text prompt."""


def padding_lengths(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """The number of padding tokens at the left of each row, int64 [rows], on the CPU.

    Args:
        input_ids: int64 [rows, length].
        mask: [rows, length], nonzero at tokens; None means that there is no padding.

    Raises:
        RequestError: the mask has another shape than `input_ids`, has no token in a row, or is not
            zeros followed by ones.
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
    invalid = (present != (columns >= padding[:, None])).any(1) | (padding == present.shape[1])
    if invalid.any():
        row = int(invalid.nonzero()[0])
        raise RequestError(
            f"row {row} of attention_mask is {present[row].int().tolist()}; expected zeros "
            "followed by ones: pad on the left (padding_side='left')"
        )
    return padding


def check_model_arguments(arguments: Mapping[str, Any], padding: Tensor) -> None:
    """Refuse arguments of the model's forward that would change the result.

    Args:
        arguments: the model's arguments, without the attention mask.
        padding: int64 [rows], the number of padding tokens of each row.

    Raises:
        RequestError: the user gave an argument, or its value differs from transformers' default.
    """
    for name, value in arguments.items():
        if value is None or name in OF_THE_HOST or (name == ENCODED and not value):
            continue
        if name in CACHES:
            if getattr(value, "_is_user_defined", False) or value.get_seq_length() > 0:
                raise RequestError(
                    f"{name} was given; mtpc keeps its own KV cache: give the whole text "
                    "as input_ids (mtpc reuses its beginning, see docs/engine.md)"
                )
        elif name == "position_ids":
            _check_positions(value, padding)
        else:
            raise RequestError(
                f"the argument {name!r} is not supported; mtpc takes input_ids and attention_mask"
            )


def _check_positions(positions: Tensor, padding: Tensor) -> None:
    """Check that the positions of each row's tokens count from 0. Those of padding may be any."""
    columns = torch.arange(positions.shape[-1])
    expected = columns - padding[:, None]
    # Positions may have one row for all rows, and leading dimensions of position grids.
    rows = positions.cpu().expand(*positions.shape[:-2], *expected.shape)
    if ((rows != expected) & (expected >= 0)).any():
        raise RequestError(
            "position_ids are not those of the tokens in order; mtpc numbers each row from 0: "
            "leave them out"
        )
