"""Integers as sums of named parts: where rows begin, and numbers of a request that have bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction
from typing import Any

Sum = tuple[tuple[str, Any], ...]
"""(part, how often) each, in order. Parts are

- "1", for a number that is known;
- "start X": how many rows all requests before this one have, if each has as many as X says. X is
  the number 1 or a part, so "start 1" is the request's number;
- "used X": the same of all requests that are on;
- "slot S", "page X", a request's slot, or one of its pages or the null page;
- others: numbers of a request that is on. "~" begins those that differ between elements.
"""
SLOT: Sum = (("slot S", 1),)
REQUEST: Sum = (("start 1", 1),)


def number(value: int) -> Sum:
    return (("1", value),) if value else ()


def plus(*terms: tuple[Sum, Any]) -> Sum:
    """Sums, each taken so often."""
    found: dict[str, Any] = {}
    for given, times in terms:
        for part, count in given:
            found[part] = found.get(part, 0) + count * times
    return tuple(sorted((part, count) for part, count in found.items() if count))


def minus(one: Sum, other: Sum) -> Sum:
    return plus((one, 1), (other, -1))


def places(given: Sum | None) -> Sum:
    """The parts that depend on company."""
    return tuple(one for one in given or () if " " in one[0])


def start(layout: Sum, word: str = "start") -> Sum:
    """Where the rows of a request begin that has as many as `layout` says."""
    return tuple(sorted((f"{word} {part}", count) for part, count in layout))


def layout_of(given: Sum | None) -> Sum | None:
    """The layout in which a number is where rows begin and something of the request's own."""
    found = places(given)
    layout = tuple(sorted((part.removeprefix("start "), count) for part, count in found))
    return layout if found and start(layout) == found else None


class Bounds:
    """What is known of parts: sums that they are no smaller than, and no larger than.

    The bounds of a part name only parts that are older.
    """

    def __init__(self) -> None:
        self.known: dict[str, tuple[list[Sum], list[Sum]]] = {}

    def add(self, part: str, low: Iterable[Sum] = (), high: Iterable[Sum] = ()) -> Sum:
        """A part, of which more is known from now on."""
        lows, highs = self.known.setdefault(part, ([], []))
        lows.extend(low)
        highs.extend(high)
        return ((part, 1),)

    def holds(self, goal: Sum, facts: Collection[Sum] = frozenset()) -> bool:
        """Whether an integer is 0 or more, if all facts are: its least value is above -1.

        Facts are subtracted so often that a part cancels. Then parts give way to their bounds, the
        newest first, as the bounds of newer ones name it.
        """
        parts = [one for one in goal if one[0] != "1"]
        if not parts:
            return dict(goal).get("1", 0) > -1
        for fact in facts:
            for part, count in fact:
                times = Fraction(dict(parts).get(part, 0)) / count
                rest = set(facts) - {fact}
                if times > 0 and self.holds(plus((goal, 1), (fact, -times)), rest):
                    return True
        ages = list(self.known)
        part, count = max(parts, key=lambda one: ages.index(one[0]) if one[0] in ages else -1)
        bounds = self.known.get(part, ([], []))[0 if count > 0 else 1]
        return any(
            self.holds(plus((goal, 1), (((part, 1),), -count), (bound, count)), facts)
            for bound in bounds
        )
