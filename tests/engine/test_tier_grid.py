""" "auto" against every fixed K: loads of the grid of `benchmarks.tier_grid`, simulated."""

from __future__ import annotations

import pytest

from benchmarks.harness.loads import GRID, Load, always, compute, gpu, jumps, mixed, zen5
from benchmarks.tier_grid import BEST, FLOOR, Shares, compare
from mtpc.engine.tiers import TierPolicy, _Cell


def check(loads: list[Load]) -> None:
    """Every load: 0.98 of the best fixed K, and at no time under 0.95 of K = 0."""
    found = {load: compare(load) for load in loads}
    worst = sorted(found.items(), key=lambda pair: pair[1])[:5]
    mean = sum(shares.best for shares in found.values()) / len(found)
    print(f"{len(found)} loads, mean {mean:.4f}, worst {worst}")
    assert worst[0][1].best >= BEST, worst
    assert min(shares.plain for shares in found.values()) >= BEST
    assert min(shares.floor for shares in found.values()) >= FLOOR


def test_part_of_the_grid() -> None:
    check(GRID[5::241])


@pytest.mark.slow
def test_the_grid() -> None:
    check(GRID)


class Untried(TierPolicy):
    """A fault: it tries nothing."""

    def _next_trial(self, cell: _Cell) -> int | None:
        return None


def test_the_grid_finds_a_fault() -> None:
    load = Load(gpu, 1, 64, jumps, True)
    assert compare(load).best >= BEST
    assert compare(load, Untried).best < 0.96


@pytest.mark.parametrize("drift", ["memory", "all", "abrupt"])
def test_it_gains_where_costs_change(drift: str) -> None:
    """Where the best K changes with the machine, no fixed K is as good."""
    found: Shares = compare(Load(zen5, 2, 1024, always(0.4), True, drift))
    assert found.best >= BEST


def test_requests_that_differ_gain() -> None:
    """Where every other request is hopeless, no fixed K is as good as one by request."""
    assert compare(Load(zen5, 1, 64, mixed, True)).best > 1.1
    assert compare(Load(compute, 2, 64, mixed, False)).best >= BEST
