"""Synthetic acceptance: the options that set it, and published acceptance lengths.

Names and meanings are vLLM's (`vllm/config/speculative.py`). An acceptance length is the mean
number of tokens of a step, the target's own token included. A rate is the share of steps that
accept the draft at a position and all drafts before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from mtpc.errors import OptionError

Rates = tuple[float, ...]

GOLDEN_LENGTHS: dict[str, dict[int, float]] = {
    "deepseek-v4-pro": {
        1: 1.79, 2: 2.27, 3: 2.49, 4: 2.54, 5: 2.55, 6: 2.55, 7: 2.54, 8: 2.58,
    },
    "deepseek-v4-pro-no-thinking": {
        1: 1.92, 2: 2.61, 3: 2.97, 4: 3.00, 5: 3.10, 6: 3.16, 7: 3.00, 8: 3.11,
    },
    "glm-5.2": {
        1: 1.84, 2: 2.50, 3: 2.99, 4: 3.33, 5: 3.61, 6: 3.78, 7: 3.91, 8: 4.06,
    },
    "qwen3.5-397b": {
        1: 1.93, 2: 2.73, 3: 3.39, 4: 3.97, 5: 4.41, 6: 4.80, 7: 5.04, 8: 5.21,
    },
    "qwen3.5-397b-no-thinking": {
        1: 1.92, 2: 2.70, 3: 3.33, 4: 3.83, 5: 4.20, 6: 4.48, 7: 4.73, 8: 4.71,
    },
    "qwen3.8-27b": {3: 2.52},
}  # fmt: skip
"""Acceptance lengths by K that InferenceX measured with real MTP layers, on the coding prompts of
SPEED-Bench: `golden_al_distribution/` of github.com/SemiAnalysisAI/InferenceX, the files
dsv4_mtp.yaml, glm5.2_mtp.yaml and qwen3.5_mtp.yaml of commit 843c6254, qwen3.827b_bf16_mtp.yaml of
commit 5625e803."""


def settle(spec_tokens: int, rates: Any, length: Any) -> Rates:
    """The acceptance rates of K positions, from the options; () without synthetic acceptance.

    Args:
        spec_tokens: K.
        rates: the rates themselves; () for none.
        length: an acceptance length, a name in `GOLDEN_LENGTHS`, or None. The length becomes the
            rates with the least variance: 1 up to a position, a share there, and 0 after it.

    Raises:
        OptionError: both are given, or a value does not suit K drafts.
    """
    row = _row(rates)
    if length is None and not row:
        return ()
    if length is not None and row:
        raise OptionError(
            "synthetic_acceptance_rates and synthetic_acceptance_length were both given; give one"
        )
    if not spec_tokens:
        raise OptionError("synthetic acceptance needs drafts; spec_tokens is 0, expected 1 or more")
    if length is not None:
        tokens = _golden(length, spec_tokens)
        return tuple(min(max(tokens - 1 - place, 0.0), 1.0) for place in range(spec_tokens))
    if len(row) != spec_tokens:
        raise OptionError(
            f"synthetic_acceptance_rates has {len(row)} entries; expected one for each of "
            f"{spec_tokens} drafts"
        )
    if not all(0 <= rate <= 1 for rate in row) or sorted(row, reverse=True) != list(row):
        raise OptionError(
            f"synthetic_acceptance_rates is {row!r}; expected numbers in 0..1 that do not grow: a "
            "rate is the share of steps that accept a draft and all before it, as (0.9, 0.6, 0.3)"
        )
    return row


def _row(rates: Any) -> Rates:
    is_row = isinstance(rates, Iterable) and not isinstance(rates, (str, Iterator))
    row = tuple(rates) if is_row else (rates,)
    if not all(_is_number(rate) for rate in row):
        raise OptionError(
            f"synthetic_acceptance_rates is {rates!r}; expected a number for each draft"
        )
    return tuple(map(float, row))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _golden(length: Any, spec_tokens: int) -> float:
    """The acceptance length as a number; a name is looked up in `GOLDEN_LENGTHS`."""
    if not isinstance(length, str):
        if not _is_number(length) or not 1 <= length <= spec_tokens + 1:
            raise OptionError(
                f"synthetic_acceptance_length is {length!r}; expected 1..{spec_tokens + 1} tokens "
                f"per step with {spec_tokens} drafts"
            )
        return float(length)
    if length not in GOLDEN_LENGTHS:
        names = ", ".join(GOLDEN_LENGTHS)
        raise OptionError(
            f"synthetic_acceptance_length is {length!r}; expected a number, or one of {names}"
        )
    if spec_tokens not in GOLDEN_LENGTHS[length]:
        known = ", ".join(map(str, GOLDEN_LENGTHS[length]))
        raise OptionError(
            f"{length} has no golden acceptance length for {spec_tokens} drafts; expected a K "
            f"among {known}"
        )
    return GOLDEN_LENGTHS[length][spec_tokens]
