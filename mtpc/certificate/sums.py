"""Integers as sums of named parts: where rows begin, and numbers of a request that have bounds.

Parts are

- "1", for a number that is known;
- "start X": how many rows all requests before this one have, if each has as many as X says. X is
  the number 1 or a part, so "start 1" is the request's number; "used X": so of all that are on;
- "slot S", "page X": a request's slot, or one of its pages or the null page;
- others: numbers of a request that is on. "~" begins those that differ between elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Sum:
    """Parts in order, and how often each is taken."""

    parts: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Sum:
        return cls(tuple(sorted((part, count) for part, count in counts.items() if count)))

    def __add__(self, other: Sum | int) -> Sum:
        counts = Counter[str](dict(self.parts))
        counts.update(dict(other.parts) if isinstance(other, Sum) else {"1": other})
        return Sum.of(counts)

    def __mul__(self, times: Any) -> Sum:
        return Sum.of({part: count * times for part, count in self.parts})

    def __sub__(self, other: Sum | int) -> Sum:
        return self + other * -1

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __getitem__(self, part: str) -> Any:
        return dict(self.parts).get(part, 0)

    def shares(self, other: Sum, word: str = "") -> bool:
        """Whether both have a part that begins with a word."""
        return any(part.startswith(word) and other[part] for part, _ in self.parts)

    def __str__(self) -> str:
        return "+".join(str(n) if part == "1" else f"{n}*{part}" for part, n in self.parts)

    @property
    def places(self) -> Sum:
        """The parts that depend on company."""
        return Sum(tuple(one for one in self.parts if " " in one[0]))

    @property
    def own(self) -> Sum:
        return self - self.places

    @property
    def layout(self) -> Sum | None:
        """How many rows requests have, if the places are where those of one begin."""
        names = {part.partition(" ")[0] for part, _ in self.places.parts}
        counts = {part.partition(" ")[2]: count for part, count in self.places.parts}
        return Sum.of(counts) if names == {"start"} else None

    def starts(self, word: str = "start") -> Sum:
        """Where the rows of a request begin, if each has so many."""
        return Sum.of({f"{word} {part}": count for part, count in self.parts})


NONE = Sum()
ONE = Sum.of({"1": 1})
SLOT = Sum.of({"slot S": 1})


class Bounds:
    """What is known of parts: sums that they are no smaller than, and no larger than.

    The bounds of a part name only parts that are older.
    """

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, list[Sum], list[Sum]]] = {}
        self.masked: set[Sum] = set()  # Parts that are 0 for requests that are off.
        self.anchors: dict[Sum, list[Sum]] = {}  # Last accepted rows -> layouts that have them.
        self.loose: set[str] = set()  # Parts that are any numbers: no rows are taken by them.

    def add(self, part: str, low: Iterable[Sum] = (), high: Iterable[Sum] = ()) -> Sum:
        """A part, of which more is known from now on; it is loose if its bounds are."""
        _, *ends = self.known.setdefault(part, (len(self.known), [], []))
        for held, more in zip(ends, (low, high), strict=True):
            held.extend(more)
            self.loose |= {part} if any(map(self.is_loose, held)) else set()
        return Sum.of({part: 1})

    def loosen(self, given: Sum) -> Sum:
        self.loose |= dict(given.parts).keys()
        return given

    def is_loose(self, given: Sum) -> bool:
        return any(part in self.loose for part, _ in given.parts)

    def ends(self, layout: Sum) -> Sum:
        """Where the rows of a request end, of which it has so many: 0 or more."""
        for part in dict(layout.parts).keys() - {"1"}:
            self.add(part, [NONE])
            self.loose.discard(part)
        return layout.starts() + layout

    def row(self, layout: Sum) -> Sum:
        """The number of a row: where its request's begin, and how far it is from there."""
        name = f"off({layout})".replace(" ", "")
        if name not in self.known:
            self.add(name, [NONE], [layout - 1])
        return layout.starts() + (Sum.of({name: 1}) if layout != ONE else NONE)

    def accepted(self, layout: Sum) -> Iterable[Sum]:
        """A request's last accepted row among its rows in a layout, which may have more before."""
        for one, layouts in self.anchors.items():
            shifts = [layout - read for read in layouts]
            yield from (one + shift for shift in shifts if all(n > 0 for _, n in shift.parts))

    def within(self, given: Sum, low: Sum, high: Sum, facts: Iterable[Sum] = ()) -> bool:
        known = frozenset(facts)
        return self.holds(given - low, known) and self.holds(high - given, known)

    def holds(self, goal: Sum, facts: Collection[Sum] = frozenset()) -> bool:
        """Whether an integer is 0 or more, if all facts are: its least value is above -1.

        Facts are subtracted so often that a part cancels. Then parts give way to their bounds, the
        newest first, as the bounds of newer ones name it.
        """
        counts = dict(goal.parts)
        constant = counts.pop("1", 0)
        if not counts:
            return bool(constant > -1)
        for fact in facts:
            for part, count in fact.parts:
                times = Fraction(counts.get(part, 0)) / count
                if times > 0 and self.holds(goal - fact * times, set(facts) - {fact}):
                    return True
        part = max(counts, key=lambda one: self.known.get(one, (-1,))[0])
        _, *bounds = self.known.get(part, (-1, [], []))
        rest = goal - Sum.of({part: counts[part]})
        ends = bounds[0 if counts[part] > 0 else 1]
        return any(self.holds(rest + end * counts[part], facts) for end in ends)
