""" "auto" against every fixed K: loads on a grid, simulated without a model.

Costs of steps are four machines in formulas, with noise and outliers as measured ones have them.
Requests come in a burst or at random, decode together, and accept drafts by chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mtpc.engine.tiers import TierPolicy

TIERS, BUCKETS = (0, 1, 2, 3), (1, 2, 4, 8)
Cost = Callable[[int, int, int], float]


def zen5(num_reqs: int, tier: int, context: int) -> float:
    """Milliseconds near those of benchmarks/results/zen5/decode-0.5b.md."""
    rows = 0.9 * num_reqs + 5.5 * tier + 2.2 * num_reqs * tier
    return 24 + rows + 0.002 * context * (1 + 0.1 * tier)


def xeon(num_reqs: int, tier: int, context: int) -> float:
    """Milliseconds near those of benchmarks/results/xeon-amx/decode-0.5b.md."""
    return 33.5 + 0.7 * num_reqs + 4 * tier + 0.8 * num_reqs * tier + 0.002 * context


def gpu(num_reqs: int, tier: int, context: int) -> float:
    """Hardly a difference between few rows and many."""
    return 10 + 0.6 * tier + 0.05 * num_reqs * (tier + 1) + 0.0004 * context


def compute(num_reqs: int, tier: int, context: int) -> float:
    """Every row costs."""
    return 2 + 4 * num_reqs * (tier + 1)


@dataclass(frozen=True)
class Case:
    """One load of one machine."""

    cost: Cost
    batch: int
    context: int
    chance: float
    is_burst: bool

    def arrivals(self, count: int, new: int) -> list[float]:
        """In milliseconds: all at once, or at about the speed at which requests end."""
        draw = random.Random(5)
        pace = new * self.cost(1, 0, self.context) * 1.2 / max(1, 0.6 * self.batch)
        gaps = (0.0 if self.is_burst else draw.expovariate(1 / pace) for _ in range(count))
        return list(itertools.accumulate(gaps))


@dataclass
class Running:
    """A request that decodes."""

    left: int
    length: int
    drafts: int = max(TIERS)


def tokens_per_ms(case: Case, chosen: TierPolicy | int, count: int, new: int) -> float:
    """New tokens over the time in which there was work."""
    draw, noise, now, work, tokens = random.Random(1), random.Random(2), 0.0, 0.0, 0
    waiting, running = case.arrivals(count, new), list[Running]()
    while waiting or running:
        now = now if running else max(now, waiting[0])
        joining = sum(arrival <= now for arrival in waiting[: case.batch - len(running)])
        waiting = waiting[joining:]
        running += [Running(new - 1, case.context) for _ in range(joining)]
        taken = joining * (case.cost(1, 0, 0) + 0.05 * case.context)  # The prompts'.
        num_reqs = min(size for size in BUCKETS if size >= len(running))
        context = sum(request.length for request in running)
        tier = chosen if isinstance(chosen, int) else chosen.choose(num_reqs, context)
        seconds = case.cost(num_reqs, tier, context) * noise.gauss(1, 0.03)
        seconds *= 1.6 if noise.random() < 0.01 else 1
        drafts = []
        for request in running:
            verified, accepted = min(tier, request.drafts), 0
            while accepted < verified and draw.random() < case.chance:
                accepted += 1
            drafts.append((verified, accepted))
            emitted = min(accepted + 1, request.left)
            request.left, request.length = request.left - emitted, request.length + emitted
            request.drafts = tier
            tokens += emitted
        if isinstance(chosen, TierPolicy):
            chosen.observe_drafts(drafts)
            chosen.observe(num_reqs, tier, seconds, context)
        now, work, tokens = now + seconds + taken, work + seconds + taken, tokens + joining
        running = [request for request in running if request.left]
    return tokens / work


def compare(case: Case, count: int, new: int) -> tuple[float, float]:
    """What "auto" gives of the best fixed K, and of K = 0."""
    fixed = {tier: tokens_per_ms(case, tier, count, new) for tier in TIERS}
    auto = tokens_per_ms(case, TierPolicy(TIERS), count, new)
    return auto / max(fixed.values()), auto / fixed[0]


GRID = [
    Case(cost, batch, context, chance, is_burst)
    for cost in (zen5, xeon, gpu, compute)
    for batch in BUCKETS
    for context in (64, 1024, 8000)
    for chance in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    for is_burst in (True, False)
]
LEAST, USUAL, FLOOR = 0.94, 0.98, 0.95
"""Of the best fixed K in every case, and in nine of ten; and of K = 0 in every case."""


def check(cases: list[Case], count: int, new: int) -> None:
    found = {case: compare(case, count, new) for case in cases}
    worst = sorted(found.items(), key=lambda pair: pair[1])[:5]
    assert min(best for best, _ in found.values()) >= LEAST, worst
    assert min(plain for _, plain in found.values()) >= FLOOR, worst
    usual = sum(best >= USUAL for best, _ in found.values())
    assert usual >= 0.9 * len(found), worst


def test_part_of_the_grid() -> None:
    check(GRID[::11], 48, 96)


@pytest.mark.slow
def test_the_grid() -> None:
    check(GRID, 64, 128)
