"""What is proven of sums holds for all numbers that keep their bounds."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from mtpc.certificate.sums import NONE, ONE, Bounds, Sum

NAMES = ("a", "b", "c")


def _value(given: Sum, numbers: dict[str, int]) -> Fraction:
    return sum((count * Fraction(numbers.get(part, 1)) for part, count in given.parts), Fraction(0))


def _bounds(draw: random.Random) -> Bounds:
    """Of some parts, some by older ones, and by halves as quotients have them."""
    bounds = Bounds()
    for at, name in enumerate(NAMES):
        older = Sum.of({one: draw.choice((-1, 0, 1)) for one in NAMES[:at]})
        half = older * Fraction(1, draw.choice((1, 1, 2)))
        low = [half - draw.randint(0, 2)] if draw.random() < 0.8 else []
        bounds.add(name, low, [half + draw.randint(0, 2)] if draw.random() < 0.8 else [])
    return bounds


@pytest.mark.parametrize("seed", range(4))
def test_what_holds_is_true(seed: int) -> None:
    """Of all small numbers: a goal is 0 or more wherever bounds and facts are kept."""
    draw, proven = random.Random(seed), 0
    for _ in range(150):
        bounds = _bounds(draw)
        goal, *facts = (
            Sum.of({name: draw.randint(-2, 2) for name in (*NAMES, "1")}) for _ in range(3)
        )
        if not bounds.holds(goal, facts):
            continue
        proven += 1
        for given in product(range(-4, 5), repeat=len(NAMES)):
            numbers = dict(zip(NAMES, given, strict=True))
            held = [_value(fact, numbers) for fact in facts]
            for name, (_, lows, highs) in bounds.known.items():
                held += [numbers[name] - _value(low, numbers) for low in lows]
                held += [_value(high, numbers) - numbers[name] for high in highs]
            assert min(held, default=0) < 0 or _value(goal, numbers) >= 0
    assert proven > 10


def test_rows_and_places() -> None:
    """The places of a row are where its layout begins; what is left is the request's own."""
    bounds = Bounds()
    layout = Sum.of({"x": 1, "1": 2})
    row = bounds.row(layout)
    assert row.layout == layout
    assert bounds.within(row.own, NONE, layout - 1)
    assert not bounds.within(row.own + 1, NONE, layout - 1)
    assert not (row - layout.starts()).places
    assert bounds.ends(layout) - layout == layout.starts()
    assert (row + Sum.of({"slot S": 1})).layout is None
    assert ONE.starts("used").layout is None
