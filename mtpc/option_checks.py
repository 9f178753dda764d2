"""Checks of single options: each returns the value in its one form, or raises an OptionError.

An error says what was found and which values are allowed. A check takes the option's name and a
value; `integer`, `one_of` and `or_none` make checks.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mtpc.errors import MtpcError, OptionError

Check = Callable[[str, Any], Any]
AUTO = "auto"
"""The value of `spec_tokens` with which the engine chooses K, and of `backend` with which mtpc
chooses."""
COPY = "copy"
"""The value of `draft` with which drafts are copies of a request's own text."""
OWN, _BESIDE = "own", "copy+"
"""Names the model's own MTP layers in `draft`; copies stand beside the drafter after the plus."""
MAX_SPEC_TOKENS = 16
"""The largest number of drafts per step. In published measurements no draft that deep is accepted,
and every draft costs a full pass of the draft layer."""


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


def integer(low: int, high: int | None = None) -> Check:
    """The check for an integer in low..high."""

    def check(name: str, value: Any) -> int:
        check_int(name, value, low, high)
        return int(value)

    return check


def or_none(check: Check) -> Check:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(names: Sequence[str]) -> Check:
    """The check for one of some names."""

    def check(name: str, value: Any) -> str:
        if value not in names:
            raise OptionError(f"{name} is {value!r}; expected one of {', '.join(names)}")
        return str(value)

    return check


def scheme_of(names: Sequence[str]) -> Check:
    """The check for one of some schemes; the error names the nearest."""

    def check(name: str, value: Any) -> str:
        if value in names:
            return str(value)
        said = str(value).lower()
        near = [each for each in names if said and each.startswith(said)]
        near = near or difflib.get_close_matches(said, names, n=1, cutoff=0.4)
        hint = f" (the nearest is {' or '.join(map(repr, near))})" if near else ""
        raise OptionError(f"{name} is {value!r}{hint}; expected one of {', '.join(names)}")

    return check


def check_switch(name: str, value: Any) -> bool:
    """True or False alone, because a string such as "no" is truthy."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; expected True or False")
    return value


def check_choice(name: str, value: Any) -> bool | None:
    """True, False, or None where mtpc chooses."""
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; expected True, False or None")
    return value


def check_backend(name: str, value: Any) -> str:
    """The name of a backend, known or not: `mtpc.backends` has them."""
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}; expected a name, as 'cpu'")
    return value


def check_digest(name: str, value: Any) -> str:
    """A SHA-256 in hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise OptionError(
            f"{name} is {value!r}; expected 64 hexadecimal digits, as `mtpc build` prints"
        )
    return value


def _row(value: Any) -> tuple[Any, ...] | None:
    """The entries of a collection, but for text; None for any other value.

    An iterator could be read only once, and options are read more often.
    """
    is_row = isinstance(value, Iterable) and not isinstance(value, (str, Iterator))
    return tuple(value) if is_row else None


def check_names(option: str, names: Any) -> tuple[str, ...]:
    """Names of passes in order, each once."""
    row = _row(names)
    if row is None or not all(isinstance(name, str) for name in row):
        raise OptionError(f"{option} is {names!r}; expected pass names, each a string in a tuple")
    return tuple(sorted(set(row)))


def check_directory(name: str, value: Any) -> Path:
    """The path of a directory."""
    if not isinstance(value, (str, Path)) or not str(value) or not _is_path(str(value)):
        raise OptionError(f"{name} is {value!r}; expected a directory's path")
    return Path(value)


def check_drafter(name: str, value: Any) -> Path | str:
    """A directory, `COPY`, or copies beside another drafter."""
    if value == COPY or value == _BESIDE + OWN:
        return str(value)
    if isinstance(value, str) and value.startswith(_BESIDE):
        return f"{_BESIDE}{check_directory(name, value.removeprefix(_BESIDE))}"
    return check_directory(name, value)


def drafters_of(draft: Path | str | None) -> tuple[bool, str]:
    """Whether drafts are copies, and what else drafts: `OWN`, a directory, or "" for nothing."""
    text = str(draft or OWN)
    if text == COPY:
        return True, ""
    return text.startswith(_BESIDE), text.removeprefix(_BESIDE)


def copies_text(draft: Path | str | None) -> str:
    """What of the option `draft` is no fact of a checkpoint, for keys: whether there are copies."""
    copies, other = drafters_of(draft)
    return ("copy+" if other else COPY) if copies else ""


def _is_path(text: str) -> bool:
    """Whether the operating system accepts this text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def check_buckets(name: str, buckets: Any) -> tuple[int, ...]:
    """Batch sizes in ascending order without duplicates; a single number is allowed."""
    row = (buckets,) if isinstance(buckets, int) else _row(buckets)
    if row is None:
        raise OptionError(f"{name} is {buckets!r}; expected integers, such as (1, 2, 4)")
    if not row:
        raise OptionError(f"{name} is empty; expected at least one number, such as (1,)")
    for size in row:
        check_int(name, size, low=1, high=4096)
    return tuple(sorted(set(row)))


def check_layers(name: str, layers: Any) -> tuple[int, ...]:
    """Numbers of layers in ascending order without duplicates."""
    row = _row(layers)
    if row is None:
        raise OptionError(f"{name} is {layers!r}; expected numbers of layers, such as (2, 12, 21)")
    for layer in row:
        check_int(name, layer, 0)
    return tuple(sorted(set(row)))


def check_tiers(name: str, tiers: Any) -> tuple[int, ...]:
    """Numbers of drafts in ascending order without duplicates."""
    row = _row(tiers)
    if row is None:
        raise OptionError(f"{name} is {tiers!r}; expected several numbers, such as (0, 1, 3)")
    for tier in row:
        check_int(name, tier, low=0, high=MAX_SPEC_TOKENS)
    return tuple(sorted(set(row)))


def check_budgets(name: str, budgets: Any) -> tuple[int, ...]:
    """Rows a request, ascending without duplicates; a number is one budget."""
    row = _row((budgets,) if isinstance(budgets, int) else budgets)
    if row is None:
        raise OptionError(f"{name} is {budgets!r}; expected numbers of rows, such as (2, 3)")
    for budget in row:
        check_int(name, budget, low=1, high=MAX_SPEC_TOKENS + 1)
    return tuple(sorted(set(row)))


def check_spec_tokens(name: str, value: Any) -> int | str:
    """A number of drafts, or "auto"."""
    if value == AUTO:
        return AUTO
    check_int(name, value, low=0, high=MAX_SPEC_TOKENS)
    return int(value)


def check_draft_vocab(name: str, ids: Any) -> tuple[int, ...]:
    """Token ids in ascending order without duplicates; a number n is the n lowest ids."""
    if isinstance(ids, int):
        check_int(name, ids, low=1)
        return tuple(range(ids))
    row = _row(ids)
    if row is None:
        raise OptionError(
            f"{name} is {ids!r}; expected token ids, or a number n for the n lowest ids"
        )
    for token_id in row:
        check_int(name, token_id, low=0)
    return tuple(sorted(set(row)))


def ids_text(token_ids: tuple[int, ...]) -> str:
    """Token ids as one short text: their number and a digest."""
    if not token_ids:
        return "all"
    return f"{len(token_ids)} ids, {sha256(repr(token_ids).encode()).hexdigest()}"
