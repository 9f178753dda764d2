""" "auto" against every fixed K: loads of the grid of `benchmarks.tier_grid`, simulated."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.harness.loads import GRID, Load, jumps, mixed, xeon, zen5
from benchmarks.tier_grid import BEST, FLOOR, compare
from mtpc.engine.accepted import Acceptance
from mtpc.engine.tiers import TierPolicy

LEAST, USUAL = 0.95, 0.97
"""Of the best fixed K in every load; and the share of loads that have `BEST`.

Where every other request is hopeless, the K with the most tokens per second now hurries the easy
ones, and is left with the others: a fixed K = 1 may take less time for all of them.
"""


def check(loads: list[Load]) -> None:
    """0.98 of the best fixed K but in few loads, and never under 0.95 of K = 0."""
    found = {load: compare(load) for load in loads}
    worst = sorted(found.items(), key=lambda pair: pair[1])[:5]
    mean = sum(shares.best for shares in found.values()) / len(found)
    print(f"{len(found)} loads, mean {mean:.4f}, worst {worst}")
    assert worst[0][1].best >= LEAST, worst
    assert min(shares.plain for shares in found.values()) >= FLOOR
    assert sum(shares.best >= BEST for shares in found.values()) >= USUAL * len(found), worst


def test_part_of_the_grid() -> None:
    check(GRID[5::241])


@pytest.mark.slow
def test_the_grid() -> None:
    check(GRID)


class Slow(TierPolicy):
    """A fault: it knows what is accepted in the long run alone, and by request."""

    def observe_drafts(
        self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()
    ) -> None:
        super().observe_drafts(drafts, each)
        self.experience._late_is_better = 0.0


def test_the_grid_finds_a_fault() -> None:
    load = Load(xeon, 8, 1024, jumps, True)
    assert compare(load).best >= BEST
    assert compare(load, Slow).best < 0.95


def test_requests_that_differ_gain() -> None:
    """Where every other request is hopeless, no fixed K is as good as one by request."""
    assert compare(Load(zen5, 1, 64, mixed, True)).best > 1.1
