""" "auto" against every fixed K: loads on a grid, simulated without a model.

Costs of steps are those of this repository's records and of three machines in formulas, with noise
and outliers as measured ones have them. Requests come in a burst or at random, decode together, and
accept drafts by chance.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from mtpc.engine.accepted import Acceptance
from mtpc.engine.costs import StepCosts
from mtpc.engine.tiers import TierPolicy

TIERS, BUCKETS = (0, 1, 2, 3), (1, 2, 4, 8)
Cost = Callable[[int, int, int], float]
ZEN5 = Path(__file__).parents[2] / "benchmarks" / "results" / "zen5"


def _between(points: dict[int, float], at: float) -> float:
    """On the line through the two known points around `at`; the ends' lines go on."""
    known = sorted(points)
    right = min(max(1, sum(point < at for point in known)), len(known) - 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


@cache
def _recorded() -> tuple[dict[int, dict[int, float]], dict[int, float]]:
    """Milliseconds by K and batch at short contexts; and per token of context, by K."""
    rows = json.loads((ZEN5 / "acceptance.json").read_text())["rows"]
    base = {
        k: {
            batch: median(r["ms_per_step"] for r in rows if (r["spec_tokens"], r["batch"]) == place)
            for place in sorted({(row["spec_tokens"], row["batch"]) for row in rows})
            for batch in place[1:]
            if place[0] == k
        }
        for k in TIERS
    }
    rows = json.loads((ZEN5 / "context.json").read_text())["rows"]
    at = {(r["spec_tokens"], r["context"]): r["ms_per_step"] for r in rows if r["batch"] == 4}
    slope = {k: (at[k, 8192] - at[k, 512]) / (8192 - 512) / 4 for k in (0, 3)}
    return base, slope


@cache
def _base(num_reqs: int, tier: int) -> float:
    return _between(_recorded()[0][tier], num_reqs)


def zen5(num_reqs: int, tier: int, context: int) -> float:
    """Milliseconds of benchmarks/results/zen5/acceptance.json and context.json."""
    slope = _recorded()[1]
    return _base(num_reqs, tier) + (slope[0] + (slope[3] - slope[0]) * tier / 3) * context


def xeon(num_reqs: int, tier: int, context: int) -> float:
    """Milliseconds near those of benchmarks/results/xeon-amx/decode-0.5b.md."""
    return 33.5 + 0.7 * num_reqs + 4 * tier + 0.8 * num_reqs * tier + 0.002 * context


def gpu(num_reqs: int, tier: int, context: int) -> float:
    """Hardly a difference between few rows and many."""
    return 10 + 0.6 * tier + 0.05 * num_reqs * (tier + 1) + 0.0004 * context


def compute(num_reqs: int, tier: int, context: int) -> float:
    """Every row costs."""
    return 2 + 4 * num_reqs * (tier + 1)


Chance = Callable[[int, int], float]
"""The probability that a draft is accepted, of a request's number and the tokens so far."""


def jumps(request: int, tokens: int) -> float:
    """All texts change at once, from hopeless to easy and back: against the policy's memory."""
    return 0.95 * (tokens // 400 % 2)


def mixed(request: int, tokens: int) -> float:
    """Every other request is hopeless."""
    return 0.95 * (request % 2)


def always(chance: float) -> Chance:
    """One probability for all."""

    def of(request: int, tokens: int) -> float:
        return chance

    of.__name__ = f"{chance:g}"
    return of


@dataclass(frozen=True)
class Case:
    """One load of one machine.

    Attributes:
        drift: what of a step takes up to a third more or less time, in seconds: "nothing", what it
            reads of "memory" in any case, or "all".
    """

    cost: Cost
    batch: int
    context: int
    chance: Chance
    is_burst: bool
    drift: str = "nothing"

    def arrivals(self, count: int, new: int) -> list[float]:
        """In milliseconds: all at once, or at about the speed at which requests end."""
        draw = random.Random(5)
        pace = new * self.cost(1, 0, self.context) * 1.2 / max(1, 0.6 * self.batch)
        gaps = (0.0 if self.is_burst else draw.expovariate(1 / pace) for _ in range(count))
        return list(itertools.accumulate(gaps))

    def ms(self, num_reqs: int, tier: int, context: int, now: float) -> float:
        """A step's time at a moment."""
        plain, more = self.cost(num_reqs, tier, context), 0.33 * math.sin(now / 1000)
        slower = {"nothing": 0.0, "memory": self.cost(1, 0, 0), "all": plain}
        return plain + more * slower[self.drift]


@dataclass
class Running:
    """A request that decodes."""

    number: int
    left: int
    length: int
    drafts: int = max(TIERS)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Shares(NamedTuple):
    """What "auto" gives of the tokens per second of the best fixed K, and of K = 0."""

    best: float
    plain: float


def tokens_per_ms(case: Case, chosen: TierPolicy | int, count: int, new: int) -> float:
    """New tokens over the time in which there was work."""
    noise, now, work, tokens = random.Random(2), 0.0, 0.0, 0
    draws = [random.Random(n) for n in range(count)]
    luck = [[draw.random() for _ in range(new + 4)] for draw in draws]
    arrivals, running = case.arrivals(count, new), list[Running]()
    waiting = list(range(count))
    while waiting or running:
        now = now if running else max(now, arrivals[waiting[0]])
        joining = [n for n in waiting[: case.batch - len(running)] if arrivals[n] <= now]
        waiting = waiting[len(joining) :]
        running += [Running(n, new - 1, case.context) for n in joining]
        taken = len(joining) * (case.cost(1, 0, 0) + 0.05 * case.context)  # The prompts'.
        num_reqs = min(size for size in BUCKETS if size >= len(running))
        context = sum(request.length for request in running)
        if isinstance(chosen, int):
            tier = chosen
        else:
            tier = chosen.choose(num_reqs, context, [r.acceptance for r in running])
        seconds = case.ms(num_reqs, tier, context, now) * noise.gauss(1, 0.03)
        seconds *= 1.6 if noise.random() < 0.01 else 1
        drafts = []
        for request in running:
            verified, accepted = min(tier, request.drafts), 0
            chance = case.chance(request.number, tokens)
            while accepted < verified and luck[request.number][request.left - accepted] < chance:
                accepted += 1
            drafts.append((verified, accepted))
            emitted = min(accepted + 1, request.left)
            request.left, request.length = request.left - emitted, request.length + emitted
            request.drafts = tier
            tokens += emitted
        if not isinstance(chosen, int):
            chosen.observe_drafts(drafts, [request.acceptance for request in running])
            chosen.observe(num_reqs, tier, seconds, context)
        now, work, tokens = now + seconds + taken, work + seconds + taken, tokens + len(joining)
        running = [request for request in running if request.left]
    return tokens / work


def compare(case: Case, new: int = 128, policy: type[TierPolicy] = TierPolicy) -> Shares:
    """ "auto" beside the fixed K."""
    count = max(64, 32 * case.batch)  # Most of a burst's time is spent with all rows at work.
    fixed = {tier: tokens_per_ms(case, tier, count, new) for tier in TIERS}
    auto = tokens_per_ms(case, policy(TIERS), count, new)
    return Shares(auto / max(fixed.values()), auto / fixed[0])


CHANCES = (*map(always, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), jumps, mixed)
GRID = [
    Case(cost, batch, context, chance, is_burst, drift)
    for cost in (zen5, xeon, gpu, compute)
    for batch in BUCKETS
    for context in (64, 1024, 8000)
    for chance in CHANCES
    for is_burst in (True, False)
    for drift in ("nothing", "memory", "all")
]
USUAL, SHARE = 0.98, 0.93
"""Of the best fixed K, in this share of the cases."""
LEAST = 0.96
"""Of the best fixed K, 0 included, in every case."""


def check(cases: list[Case], share: float = SHARE) -> None:
    found = {case: compare(case) for case in cases}
    worst = sorted(found.items(), key=lambda pair: pair[1])[:5]
    assert worst[0][1].best >= LEAST, worst
    usual = sum(shares.best >= USUAL for shares in found.values())
    mean = sum(shares.best for shares in found.values()) / len(found)
    print(f"{len(found)} cases, {usual} usual, mean {mean:.4f}, worst {worst}")
    assert usual >= share * len(found), worst


def test_part_of_the_grid() -> None:
    check(GRID[5::241], share=0.75)


@pytest.mark.slow
def test_more_of_the_grid() -> None:
    check(GRID[2::11])


class Untried(TierPolicy):
    """A fault: it tries nothing."""

    def _next_trial(self, costs: StepCosts) -> int | None:
        return None


def test_the_grid_finds_a_fault() -> None:
    case = Case(gpu, 1, 64, jumps, True)
    assert compare(case).best >= USUAL
    assert compare(case, policy=Untried).best < LEAST


def test_requests_that_differ_gain() -> None:
    """Where every other request is hopeless, no fixed K is as good as one by request."""
    assert compare(Case(zen5, 1, 64, mixed, True)).best > 1.1
