"""Places for memory that is live for a part of a step only, in one pool."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Live:
    """Memory that a step allocates: a temporary value, or scratch memory of an operator, of a size
    as torch's allocator rounds it. `first` is the index of the node that allocates it, and `last`
    of the last that reads it or a view of it."""

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Live) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Placed:
    """Live memory and its place in a pool: bytes `offset` to `end`, the latter excluded."""

    live: Live
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.live.nbytes


def place_live(live: Iterable[Live]) -> list[Placed]:
    """Give each an offset, so that memory which is live at the same time does not overlap.

    The largest is placed first, each in the lowest gap that holds it.
    """
    placed: list[Placed] = []  # Sorted by offset.
    for item in sorted(live, key=lambda item: (-item.nbytes, item.first)):
        offset = 0
        for other in placed:
            if not item.meets(other.live):
                continue
            if offset + item.nbytes <= other.offset:
                break
            offset = max(offset, other.end)
        insort(placed, Placed(item, offset), key=lambda other: other.offset)
    return placed


def pool_bytes(placed: Iterable[Placed]) -> int:
    return max((item.end for item in placed), default=0)
