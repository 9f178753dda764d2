"""The cache entry that is nearest to a key which no entry has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtpc.store.key import Difference, Fields, differences
from mtpc.store.machine import COMPILER


@dataclass(frozen=True)
class Nearest:
    """The entry with the fewest differences from a wanted key, and these differences."""

    digest: str
    differences: list[Difference]


def nearest(entries: Iterable[tuple[str, Fields]], wanted: Fields) -> Nearest | None:
    """The nearest entry of the same kind; None if there is none of that kind.

    Args:
        entries: names and keys, as `peek` gives them.
        wanted: the key.
    """
    rows = [
        Nearest(name, _known(differences(fields, wanted), wanted))
        for name, fields in entries
        if fields.get("kind") == wanted.get("kind")
    ]
    return min(rows, key=lambda row: len(row.differences), default=None)


def _known(found: list[Difference], wanted: Fields) -> list[Difference]:
    """Differences without that of the compiler, if none is installed here."""
    return [d for d in found if d.field != COMPILER or COMPILER in wanted]
