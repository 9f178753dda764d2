"""Choosing K: from costs and acceptance that are known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mtpc.engine.tiers import DWELL, PROBE, TierPolicy

TIERS = (0, 1, 2, 3)
Cost = Callable[[int, int], float]


def bandwidth_bound(num_reqs: int, tier: int) -> float:
    """Weights are read once; a draft reads a little more."""
    return 1.0 + 0.1 * tier


def compute_bound(num_reqs: int, tier: int) -> float:
    """Every row costs."""
    return 0.25 * num_reqs * (tier + 1)


def run(
    policy: TierPolicy, cost: Cost, chance: float, steps: int, num_reqs: int = 2, seed: int = 0
) -> list[int]:
    """Steps whose drafts are accepted by chance; returns the K of each."""
    draw, chosen, before = random.Random(seed), [], 3
    for _ in range(steps):
        tier = policy.choose(num_reqs)
        verified = min(tier, before)
        drafts = []
        for _ in range(num_reqs):
            accepted = 0
            while accepted < verified and draw.random() < chance:
                accepted += 1
            drafts.append((verified, accepted))
        policy.observe(num_reqs, tier, cost(num_reqs, tier), drafts)
        chosen.append(tier)
        before = tier
    return chosen


@pytest.mark.parametrize(
    ("cost", "chance", "expected"),
    [
        (bandwidth_bound, 0.95, {3}),
        (bandwidth_bound, 0.0, {0}),
        (bandwidth_bound, 0.3, {1, 2}),
        (compute_bound, 0.9, {0}),
    ],
)
def test_it_settles_on_the_best(cost: Cost, chance: float, expected: set[int]) -> None:
    """1.3 tokens for 1.1, or 1.39 for 1.2, beat 1; and where rows cost, drafts never pay."""
    last = run(TierPolicy(TIERS), cost, chance, 600)[-200:]
    assert sum(tier in expected for tier in last) > 180


def test_every_cost_is_measured_first() -> None:
    policy = TierPolicy(TIERS)
    assert sorted(run(policy, bandwidth_bound, 0.9, 8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(run(policy, bandwidth_bound, 0.9, 8, num_reqs=4)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_it_notices_that_the_text_changed() -> None:
    """At K = 0 nothing is learnt but by probes."""
    policy = TierPolicy(TIERS)
    hard = run(policy, bandwidth_bound, 0.0, 300)
    assert policy.current == 0
    assert hard[::-1].index(3) <= PROBE
    assert hard[100:].count(3) / len(hard[100:]) < 0.06
    easy = run(policy, bandwidth_bound, 1.0, 40 * PROBE, seed=1)
    assert policy.current == 3
    assert easy.index(3) <= PROBE


def test_it_does_not_flutter() -> None:
    """Two tiers as good as each other, measured with noise."""
    policy, draw = TierPolicy((1, 2)), random.Random(1)
    run(policy, lambda _, tier: (1 + 0.5 * tier) * draw.uniform(0.97, 1.03), 0.5, 1000)
    assert policy.switches <= 5
    assert DWELL > 1


def test_what_was_not_drafted_does_not_count() -> None:
    """After a step of K = 1, a step of K = 3 verifies one real draft."""
    policy = TierPolicy(TIERS)
    policy.observe(1, 3, 1.0, [(1, 1)])
    assert policy.acceptance(0) == 1.0
    assert policy.acceptance(2) == 1.0  # Taken from position 0.
    policy.observe(1, 3, 1.0, [(3, 1)])
    assert policy.acceptance(1) == 0.0
    assert policy.length(3) == pytest.approx(2.0)
