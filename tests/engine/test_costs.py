"""What steps cost: one estimate for all K."""

from __future__ import annotations

import math
import random

import pytest

from mtpc.engine.estimates import StepCosts

TIERS = (0, 1, 3)
WORK = {k: k for k in TIERS}


def measured(*rounds: tuple[float, float, float], noise: float = 0.0) -> StepCosts:
    """Costs after steps of each K in turn."""
    draw, costs = random.Random(1), StepCosts(WORK)
    costs.add(0, rounds[0][0], 0)
    for number, seconds in enumerate(rounds):
        for place, tier in enumerate(TIERS):
            costs.add(tier, seconds[place] * math.exp(draw.gauss(0, noise)), 3 * number + place)
    return costs


def test_they_are_what_was_measured() -> None:
    costs = measured(*[(1.0, 1.2, 1.5)] * 50, noise=0.03)
    for tier, seconds in zip(TIERS, (1.0, 1.2, 1.5), strict=True):
        assert costs.seconds(tier) == pytest.approx(seconds, rel=0.04)
    assert costs.counts == [51, 50, 50]
    assert costs.last == [147, 148, 149]


@pytest.mark.parametrize("more", [(0.3, 0.3), (0.3, 0.6)], ids=["memory", "all"])
def test_all_move_with_one(more: tuple[float, float]) -> None:
    """A machine that gets slower while one K runs: the others are expected to cost more, and in
    doubt. Whether all of a step is slower or what it reads, the guess is between."""
    costs = measured(*[(1.0, 2.0, 2.5)] * 50)
    before = costs.doubt(1, 0)
    for step in range(60):
        costs.add(0, 1 + more[0] * min(step / 40, 1), 200 + step)
    assert costs.seconds(0) == pytest.approx(1.3, rel=0.02)
    assert 2.3 * 0.98 < costs.seconds(1) < 2.6 * 1.02
    assert costs.doubt(1, 0) > before
    for step in range(3):
        costs.add(1, 2 + more[1], 260 + step)
    assert costs.seconds(1) == pytest.approx(2 + more[1], rel=0.04)
    assert costs.seconds(0) == pytest.approx(1.3, rel=0.05)


def test_one_spike_counts_little_and_two_in_full() -> None:
    costs = measured(*[(1.0, 1.2, 1.5)] * 50)
    doubt = costs.doubt(1, 0)
    costs.add(0, 3.0, 150)
    assert costs.seconds(0) < 1.2
    assert costs.doubt(1, 0) == pytest.approx(doubt, rel=0.3)
    costs.add(0, 3.0, 151)
    assert costs.seconds(0) > 2.0
    assert costs.doubt(1, 0) > 3 * doubt


def test_requests_that_join_are_no_surprise() -> None:
    """A third more tokens make steps a fourth longer: all K, at once. What follows is held against
    these longer steps, so that one that takes too long by chance still counts little."""
    costs, doubt = measured(*[(1.0, 1.2, 1.5)] * 50), 0.0
    for step in range(150, 250):
        costs.add(3, 1.5, step, 24_000)
        doubt = costs.doubt(0, 3)
    costs.add(3, 1.9, 250, 32_000)
    assert costs.surprises[3] == 0
    assert [costs.seconds(tier) for tier in (0, 3)] == pytest.approx([1.27, 1.9], rel=0.06)
    assert costs.doubt(0, 3) == pytest.approx(doubt, rel=0.03)
    costs.add(3, 3.0, 251, 32_012)
    assert costs.surprises[3] > 0
    assert costs.seconds(3) < 2.2
    assert costs.changed == 0


def test_a_second_sample_may_be_a_spike_only_if_it_is_long() -> None:
    """The first sample may be the one that took too long."""
    known = measured(*[(1.0, 1.2, 1.5)] * 50)
    costs = StepCosts(WORK, 150, known)
    costs.add(1, 1.2, 150)
    costs.add(1, 2.4, 151)
    assert costs.seconds(1) < 1.5
    costs = StepCosts(WORK, 150, known)
    costs.add(1, 2.4, 150)
    costs.add(1, 1.2, 151)
    assert costs.seconds(1) == pytest.approx(1.2, rel=0.05)


def test_a_new_cell_is_like_the_nearest_one() -> None:
    """The ratios are kept, whatever the size, but in more doubt."""
    known = measured(*[(1.0, 1.1, 1.2)] * 50)
    new = StepCosts(WORK, 150, known)
    new.add(1, 5.5, 150)
    assert [new.seconds(tier) for tier in TIERS] == pytest.approx([5.0, 5.5, 6.0], rel=0.02)
    assert new.doubt(3, 1) > known.doubt(3, 1)
