"""Checks of single options. Each raises an OptionError that says which values are allowed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtpc.errors import MtpcError, OptionError

SCHEMES = ("int4-g32", "int4-g128", "int8", "fp8")
"""Names of schemes that quantise weights; `mtpc.weights.quantise` defines them."""


def unknown_option(name: str, known: list[str]) -> str:
    """The message for an unknown option. It suggests the most similar name, or lists all."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(known))}"
    return f"unknown option {name!r}; {hint}"


def check_int(
    name: str,
    value: Any,
    low: int,
    high: int | None = None,
    refusal: type[MtpcError] = OptionError,
) -> None:
    """Check for an integer in low..high, without an upper limit if `high` is None.

    Raises:
        refusal: the value is another.
    """
    wanted = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise refusal(f"{name} is {value!r} ({type(value).__name__}); expected {wanted}")
    if value < low or (high is not None and value > high):
        raise refusal(f"{name} is {value}; expected {wanted}")


def _row(value: Any) -> tuple[Any, ...] | None:
    """The entries of an iterable other than text; None for any other value."""
    is_row = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(value) if is_row else None


def check_names(option: str, names: Any) -> tuple[str, ...]:
    """Names of passes, as a tuple."""
    row = _row(names)
    if row is None or not all(isinstance(name, str) for name in row):
        raise OptionError(f"{option} is {names!r}; expected pass names, each a string in a tuple")
    return row


def check_directory(name: str, value: Any) -> Path | None:
    """The path of a directory; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or not str(value) or not _is_path(str(value)):
        raise OptionError(f"{name} is {value!r}; expected a directory's path")
    return Path(value)


def _is_path(text: str) -> bool:
    """Whether the operating system accepts this text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def check_buckets(buckets: Any) -> tuple[int, ...]:
    """Batch sizes in ascending order without duplicates; a single number is allowed."""
    row = (buckets,) if isinstance(buckets, int) else _row(buckets)
    if row is None:
        raise OptionError(f"batch_buckets is {buckets!r}; expected integers, such as (1, 2, 4)")
    if not row:
        raise OptionError("batch_buckets is empty; expected at least one number, such as (1,)")
    for size in row:
        check_int("batch_buckets", size, low=1, high=4096)
    return tuple(sorted(set(row)))


def check_tiers(tiers: Any, least: int, highest: int) -> tuple[int, ...]:
    """At least `least` tiers, none above `highest`, in ascending order without duplicates."""
    row = _row(tiers)
    for tier in row or ():
        check_int("spec_tiers", tier, low=0, high=highest)
    if row is None or len(set(row)) < least:
        raise OptionError(f"spec_tiers is {tiers!r}; expected several numbers, such as (0, 1, 3)")
    return tuple(sorted(set(row)))


def check_draft_vocab(ids: Any) -> tuple[int, ...]:
    """Token ids in ascending order without duplicates; a number n is the n lowest ids."""
    if isinstance(ids, int):
        check_int("draft_vocab", ids, low=1)
        return tuple(range(ids))
    row = _row(ids)
    if row is None:
        raise OptionError(
            f"draft_vocab is {ids!r}; expected token ids, or a number n for the n lowest ids"
        )
    for token_id in row:
        check_int("draft_vocab", token_id, low=0)
    return tuple(sorted(set(row)))


def settle_token_mask(value: Any, sampling: bool, is_synthetic: bool) -> bool:
    """Whether to compile token masks; None is True where there is sampling to read them."""
    can = sampling and not is_synthetic
    if value is None:
        return can
    if not isinstance(value, bool):
        raise OptionError(f"token_mask is {value!r}; expected True, False or None")
    if value and not can:
        raise OptionError("token_mask needs sampling=True and no synthetic acceptance")
    return value


def check_scheme(option: str, value: Any) -> None:
    """Refuse a value that is not in `SCHEMES`.

    Raises:
        OptionError: the message names the nearest scheme.
    """
    if value not in SCHEMES:
        said = str(value).lower()
        near = [name for name in SCHEMES if said and name.startswith(said)]
        near = near or difflib.get_close_matches(said, SCHEMES, n=1, cutoff=0.4)
        hint = f" (the nearest is {' or '.join(map(repr, near))})" if near else ""
        raise OptionError(f"{option} is {value!r}{hint}; expected one of {', '.join(SCHEMES)}")
