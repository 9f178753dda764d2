""" "auto" against every fixed K: loads of the grid of `benchmarks.tier_grid`, simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from benchmarks.harness.loads import GRID, Load, always, jumps, mixed, xeon, zen5
from benchmarks.tier_grid import BEST, FLOOR, Shares, compare
from mtpc.engine.estimates import Acceptance
from mtpc.engine.tiers import TierPolicy

LEAST, USUAL, MOMENT = 0.97, 0.99, 0.94
"""Of the best fixed K in every load; the share of loads that have `BEST`; and of K = 0 at any
moment of every load of the whole grid, in which two loads with a drift are below `FLOOR`."""


def compared(loads: list[Load], moment: float = FLOOR) -> list[tuple[Shares, Load]]:
    """The worst first. No load is under 0.95 of K = 0 at its end, or under `moment` at any time."""
    found = sorted(((compare(load), load) for load in loads), key=lambda pair: pair[0])
    mean = sum(shares.best for shares, _ in found) / len(found)
    print(f"{len(found)} loads, mean {mean:.4f}, worst {found[:5]}")
    for shares, load in found:
        assert shares.plain >= FLOOR, load
        assert shares.floor >= moment, load
        assert shares.best >= LEAST, load
    return found


def test_part_of_the_grid() -> None:
    for shares, load in compared(GRID[5::1922]):
        assert shares.best >= BEST, load


@pytest.mark.slow
def test_the_grid() -> None:
    found = compared(GRID, MOMENT)
    assert sum(shares.best >= BEST for shares, _ in found) >= USUAL * len(found)


class Slow(TierPolicy):
    """A fault: it knows what is accepted in the long run alone, and by request."""

    def observe_drafts(
        self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()
    ) -> None:
        super().observe_drafts(drafts, each)
        self.experience._late_is_better = 0.0


class Equal(TierPolicy):
    """A fault: every token counts alike."""

    def _weigh(self, each: Sequence[Acceptance]) -> None:
        self._shares = {tier: float(tier == self.tiers[0]) for tier in self.tiers}
        super()._weigh(each)


def test_requests_that_differ() -> None:
    """Every other request is hopeless: changing K beats every fixed one."""
    load = Load(xeon, 4, 1024, mixed, True)
    assert compare(load).best > 1
    assert compare(load, Equal).best < 0.98


def test_the_grid_finds_a_fault() -> None:
    load = Load(xeon, 8, 1024, jumps, True)
    assert compare(load).best >= BEST
    assert compare(load, Slow).best < 0.95


def test_requests_that_differ_gain() -> None:
    """Where every other request is hopeless, no fixed K is as good as one by request."""
    assert compare(Load(zen5, 1, 64, mixed, True)).best > 1.1


@pytest.mark.parametrize("chance", [0.6, 0.9])
def test_a_pause_of_the_machine_says_nothing_of_drafts(chance: float) -> None:
    assert compare(Load(xeon, 1, 64, always(chance), True, "pauses")).best >= BEST
