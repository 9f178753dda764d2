"""Simulated loads, without a model, on which "auto" is compared with every fixed K.

Costs of steps are those of this repository's records and of three machines in formulas, with noise
and outliers as measured ones have them. Requests come in a burst or at random, decode together, and
accept drafts by chance. Only decode steps count.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import NamedTuple

from benchmarks import ROOT
from mtpc.engine.estimates import Acceptance
from mtpc.engine.tiers import Costs, TierPolicy

TIERS, BUCKETS = (0, 1, 2, 3), (1, 2, 4, 8)
NEW = 128
"""Tokens of a request of a load that is not short."""
MOMENTS = 64
"""Into so many parts of equal tokens a load is cut."""
Cost = Callable[[int, int, int], float]
"""Milliseconds of a step, of its requests, its K and the tokens of all its requests."""
ZEN5 = ROOT / "benchmarks" / "results" / "zen5"


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
    """Acceptance of all requests changes at once, from 0 to 0.95 and back."""
    return 0.95 * (tokens // 400 % 2)


def mixed(request: int, tokens: int) -> float:
    """Every other request accepts no drafts."""
    return 0.95 * (request % 2)


def always(chance: float) -> Chance:
    """One probability for all."""

    def of(request: int, tokens: int) -> float:
        return chance

    of.__name__ = f"{chance:g}"
    return of


CHANCES = (*map(always, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), jumps, mixed)
DRIFTS = ("nothing", "memory", "all", "abrupt")


@dataclass(frozen=True)
class Load:
    """One load of one machine.

    Attributes:
        cost: of a step, while the machine is itself.
        batch: requests that run at most.
        context: tokens of a prompt.
        chance: that a draft is accepted.
        is_burst: whether all requests come at once.
        drift: what changes. "memory": what a step reads in any case takes up to a third more or
            less time, in turns of 400 tokens a row; "all": so does the whole step. "abrupt": from
            one step to the next what drafts add takes three times as long, later what is read one
            and a half times. "pauses": three steps of a thousand take 30 plain steps more, as if
            another program had the processor.
        is_short: whether it is a burst of one request a row, of half as many tokens.
        draw: its number among loads that differ by chance alone: by which drafts are accepted, by
            when requests arrive, by noise, and by where in its swing the drift begins.
    """

    cost: Cost
    batch: int
    context: int
    chance: Chance
    is_burst: bool
    drift: str = "nothing"
    is_short: bool = False
    draw: int = 0

    @property
    def requests(self) -> int:
        """Most of a burst's time is spent with all rows at work."""
        return self.batch if self.is_short else max(64, 32 * self.batch)

    @property
    def new(self) -> int:
        """Tokens of a request, the first one of which comes with its prompt."""
        return NEW // 2 if self.is_short else NEW

    def arrivals(self) -> list[float]:
        """In milliseconds: all at once, or at about the speed at which requests end."""
        draw = random.Random(5 + self.draw)
        pace = self.new * self.cost(1, 0, self.context) * 1.2 / max(1, 0.6 * self.batch)
        gaps = (0.0 if self.is_burst else draw.expovariate(1 / pace) for _ in range(self.requests))
        return list(itertools.accumulate(gaps))

    def ms(self, num_reqs: int, tier: int, context: int, tokens: int) -> float:
        """A step's time, after so many tokens."""
        taken = self.cost(num_reqs, tier, context)
        if self.drift == "abrupt":
            phase = tokens // (1500 * self.batch) % 4
            if phase == 1:
                return 3 * taken - 2 * self.cost(num_reqs, 0, context)
            return taken + 0.5 * self.cost(1, 0, 0) if phase == 3 else taken
        if self.drift in ("nothing", "pauses"):
            return taken
        slower = taken if self.drift == "all" else self.cost(1, 0, 0)
        # By tokens and not by time, so that each K meets the same machine at the same token.
        swing = math.sin(tokens / (64 * self.batch) + self.draw * math.tau / 3)
        return taken + 0.33 * slower * swing


@dataclass
class Running:
    """A request that decodes."""

    number: int
    left: int
    length: int
    drafts: int = max(TIERS)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Moment(NamedTuple):
    """The time until a given number of a load's tokens.

    Attributes:
        work: milliseconds of decode steps.
        waited: the same, each step counted once for each of its requests.
    """

    work: float
    waited: float


def decode(load: Load, chosen: TierPolicy | int) -> list[Moment]:
    """The time until the end of each part of a load's tokens.

    Args:
        load: what is asked.
        chosen: K, or who chooses it.
    """
    first = load.requests * load.draw
    noise, now, work, waited, tokens = random.Random(2 + first), 0.0, 0.0, 0.0, 0
    draws = [random.Random(first + n) for n in range(load.requests)]
    luck = [[draw.random() for _ in range(load.new + 4)] for draw in draws]
    arrivals, running = load.arrivals(), list[Running]()
    waiting = list(range(load.requests))
    part, moments = load.requests * (load.new - 1) / MOMENTS, list[Moment]()
    while waiting or running:
        now = now if running else max(now, arrivals[waiting[0]])
        joining = [n for n in waiting[: load.batch - len(running)] if arrivals[n] <= now]
        waiting = waiting[len(joining) :]
        running += [Running(n, load.new - 1, load.context) for n in joining]
        now += len(joining) * (load.cost(1, 0, 0) + 0.05 * load.context)  # The prompts'.
        num_reqs = min(size for size in BUCKETS if size >= len(running))
        context = sum(request.length for request in running)
        if isinstance(chosen, int):
            tier = chosen
        else:
            tier = chosen.choose(num_reqs, context, [r.acceptance for r in running])
        taken = load.ms(num_reqs, tier, context, tokens) * noise.gauss(1, 0.03)
        taken *= 1.6 if noise.random() < 0.01 else 1
        if load.drift == "pauses" and noise.random() < 0.003:
            taken += 30 * load.cost(1, 0, 0)
        drafts = []
        for request in running:
            verified, accepted = min(tier, request.drafts), 0
            chance = load.chance(request.number, tokens)
            while accepted < verified and luck[request.number][request.left - accepted] < chance:
                accepted += 1
            drafts.append((verified, accepted))
            emitted = min(accepted + 1, request.left)
            request.left, request.length = request.left - emitted, request.length + emitted
            request.drafts = tier
            tokens += emitted
        if not isinstance(chosen, int):
            chosen.observe_drafts(drafts, [request.acceptance for request in running])
            chosen.observe(num_reqs, tier, taken, context)
        now, work, waited = now + taken, work + taken, waited + taken * len(running)
        moments += [Moment(work, waited)] * (int(tokens / part + 1e-9) - len(moments))
        running = [request for request in running if request.left]
    return moments


GRID = [
    Load(cost, batch, context, chance, is_burst, drift)
    for cost in (zen5, xeon, gpu, compute)
    for batch in BUCKETS
    for context in (64, 1024, 8000)
    for chance in CHANCES
    for is_burst in (True, False)
    for drift in DRIFTS
]
"""Batches 1 to 8, contexts to 8,000 tokens, acceptance 0 to 1, bursts and random arrivals."""
SHORT = [
    Load(cost, batch, 64, chance, True, is_short=True)
    for cost in (zen5, xeon, gpu, compute)
    for batch in BUCKETS
    for chance in CHANCES[:-2]
]
"""Bursts that are over before a policy that knows nothing has learnt much; see `Load.is_short`."""


def measured(cost: Cost) -> Costs:
    """The costs that an earlier run on a machine has measured, at short contexts."""
    return {(size, 0): {k: (cost(size, k, 64 * size), True) for k in TIERS} for size in BUCKETS}
