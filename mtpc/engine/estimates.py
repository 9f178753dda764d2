"""Estimates of what a decode step with each K emits and costs; `tiers` compares these.

A request with K drafts emits 1 + the sum over i <= K of a_1 * ... * a_i tokens. Here a_i is the
share of accepted drafts at position i, among those whose earlier drafts were all accepted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import Generic, TypeVar

# The weight that older samples keep at each new step: for all requests in the long run and lately,
# for one request, and for the comparison of these; and how many samples the prior counts for.
LONG_MEMORY, LATE_MEMORY, OWN_MEMORY, SCORE_MEMORY = 0.998, 0.8, 0.97, 0.98
LONG_PRIOR, LATE_PRIOR, OWN_PRIOR = 1.0, 2.0, 4.0
FIRST_SHARE = 0.7  # Of first drafts, as expected before any was verified.
SURE = 2.0  # The logarithm of a ratio of likelihoods at which another estimate is used.
LEAST = 1e-3  # The least probability that is given to what happened.
# Variances of logarithms of seconds: of a sample, and of the first one of a K, which warms up
# caches; their growth in a step, of all K alike, of the memory reads that they share and of each K;
# of a K that was never measured: of the share of a step that a row costs, of each K, and of all
# alike before the first sample; and of costs that an earlier run measured or guessed.
NOISE, FIRST_NOISE = 0.04**2, 0.3**2
COMMON_DRIFT, MEMORY_DRIFT, OWN_DRIFT = 0.05**2, 0.055**2, 0.01**2
SLOPE, BEND, ANY = 0.29**2, 0.05**2, 1e8
MEASURED, GUESSED = 0.05**2, 0.3**2
LONG = 1000  # Steps without a sample after which the variance stops growing.
SPIKE = 0.15
"""A surprise, as a logarithm, counts up to this much if the estimate was more certain than that:
other processes may have used the processor. A second one in a row counts in full, because the costs
have changed, of all K alike or of this K alone."""
T = TypeVar("T", bound=Hashable)
CellCosts = Mapping[int, tuple[float, bool]]
"""By K, the seconds of a cell's steps, and whether they ran several times or that is a guess."""


class Acceptance:
    """Counts of tried and accepted drafts at each position. The newest have the most weight: older
    samples keep `memory` of theirs at each new step. The prior counts for `prior` samples. `worth`
    is what a token of this request counts, beside those of the other requests."""

    def __init__(self, memory: float = OWN_MEMORY, prior: float = OWN_PRIOR):
        self._memory, self._prior, self.worth = memory, prior, 1.0
        self._counts: list[tuple[float, float]] = []

    def add(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Record a step: drafts that were verified, and how many of them were accepted."""
        counts = [(self._memory * tried, self._memory * right) for tried, right in self._counts]
        for verified, accepted in drafts:
            counts += [(0.0, 0.0)] * (verified - len(counts))
            for place in range(min(verified, accepted + 1)):
                tried, right = counts[place]
                counts[place] = (tried + 1, right + (place < accepted))
        self._counts = counts

    def share(self, position: int, known: float) -> float:
        """The share of drafts at a position that are accepted, if those before it all were. `known`
        is the prior."""
        tried, right = self._counts[position] if position < len(self._counts) else (0.0, 0.0)
        return (right + self._prior * known) / (tried + self._prior)


class Experience:
    """What is accepted: by all requests in the long run, by all lately, and by each for itself.
    `count` is the largest K.

    The estimate that has best predicted recent first drafts is used. With every step, even one
    without drafts, the recent estimate fades into the long run.
    """

    def __init__(self, count: int):
        self.count = count
        self._long = Acceptance(LONG_MEMORY, LONG_PRIOR)
        self._late = Acceptance(LATE_MEMORY, LATE_PRIOR)
        self._own_is_better = self._late_is_better = 0.0  # Logarithms of ratios of likelihoods.

    def add(self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()) -> None:
        """Record a step: for each request the verified and the accepted drafts, and its counts."""
        known = self._long.share(0, FIRST_SHARE)
        late, late_more, own_more = self._late.share(0, known), 0.0, 0.0
        pairs = [(found, own) for found, own in zip_longest(drafts, each) if found[0]]
        for (verified, accepted), own in pairs:
            late_more += _more(late, known, accepted)
            if own is not None:
                own_more += _more(own.share(0, known), known, accepted)
                own.add([(verified, accepted)])
        self._late.add(found for found, _ in pairs)
        self._long.add(found for found, _ in pairs)
        if pairs:
            self._late_is_better = max(SCORE_MEMORY * self._late_is_better + late_more, -SURE)
            self._own_is_better = max(SCORE_MEMORY * self._own_is_better + own_more, -SURE)

    def shares(self, one: Acceptance | None = None) -> list[float]:
        """Shares by position: of all in the long run, or others that have those as their prior."""
        found, known, ratio = list[float](), FIRST_SHARE, 1.0
        for position in range(self.count):
            known = share = self._long.share(position, known)
            if one is not None:
                share = one.share(position, min(known * ratio, 1.0))
                ratio = share / max(known, LEAST)
            found.append(share)
        return found

    def lengths(self, each: Sequence[Acceptance]) -> list[list[float]]:
        """The expected tokens of a request in steps with 0 drafts to the most: one list for each
        request that runs (`each` has their counts), or one for all."""
        guesses: Sequence[Acceptance | None] = [None]
        if max(self._own_is_better, self._late_is_better) > SURE:
            is_own = each and self._own_is_better > self._late_is_better
            guesses = each if is_own else [self._late]
        products = (accumulate(self.shares(one), mul, initial=1.0) for one in guesses)
        return [list(accumulate(product)) for product in products]


def _more(share: float, known: float, accepted: int) -> float:
    """How much better a share predicted whether the first draft was accepted."""
    hit, usual = (share, known) if accepted else (1 - share, 1 - known)
    return math.log(max(hit, LEAST) / max(usual, LEAST))


class StepCosts(Generic[T]):
    """What the steps of a cell cost: one estimate for all K, while the machine's speed changes.

    K is T, an int; with budgets T is K and a number of rows. A step measures its own K alone. So
    the estimate has the logarithms of all seconds, with a covariance (a Kalman filter): a step
    corrects the cost of its own K, and the others as far as they move together with it. A machine
    gets slower in two ways: everything takes longer, or only the memory reads that every K has.
    Between steps the covariance grows in both directions.

    Args:
        work: what there is to choose from, ascending, each with its work: a request's rows beyond
            the first. That of K is K.
        step: number of the first step.
        like: the costs of a nearby cell, whose ratios are kept.
        found: the costs of an earlier run. All of the machine may be slower or faster now.

    Attributes:
        tiers: what there is to choose from.
        allowed: by K, seconds that trials may lose; negative if they lost some in advance.
        counts: number of samples, by place in `tiers`.
        last: the step of the last sample, or -1.
        changed: the step of the last sudden change of costs; at first, the first step.
        surprises: by K, how far the last sample moved its logarithm if it was a spike, else 0.
    """

    def __init__(
        self,
        work: Mapping[T, float],
        step: int = 0,
        like: StepCosts[T] | None = None,
        found: Mapping[T, tuple[float, bool]] | None = None,
    ):
        self.tiers, self._step, self.changed, self._context = tuple(work), step, step, 0
        self.allowed, self.surprises = dict.fromkeys(work, 0.0), dict.fromkeys(work, 0.0)
        self.counts, self.last = [0] * len(self.tiers), [-1] * len(self.tiers)
        own, common = [0.0] * len(self.tiers), ANY
        # One more row may cost nothing, or as much as a whole step. A third is between these.
        self._logs = [math.log(3 + rows) for rows in work.values()]
        slopes = [3 * rows / (3 + rows) for rows in work.values()]
        self._cov = [[SLOPE * one * other for other in slopes] for one in slopes]
        if found is not None:
            self._logs = [math.log(found[k][0]) for k in self.tiers]
            self._cov, common, self.changed = [[0.0] * len(own) for _ in own], FIRST_NOISE, -1
            self.counts = [2 * found[k][1] for k in self.tiers]
            own = [MEASURED if count else GUESSED for count in self.counts]
        elif like is not None:
            self._logs, self._cov = like._logs.copy(), [row.copy() for row in like._cov]
        self._widen(common, own)

    def _widen(self, common: float, own: Sequence[float]) -> None:
        """Add variance of all K alike, and of each by itself."""
        for i, row in enumerate(self._cov):
            row[:] = [value + common + (i == j) * own[i] for j, value in enumerate(row)]

    def add(self, tier: T, seconds: float, step: int, context: int = 0) -> None:
        """Enter a sample of a step.

        If the tokens of all its requests differ from the last step's, requests came or went. The
        cost of all K may differ as much, and that is no surprise.
        """
        self.age(step)
        place = self.tiers.index(tier)
        if not any(self.counts):
            self._widen(0.0, [BEND * (k != tier) for k in self.tiers])
        if context and self._context:
            self._widen(math.log(context / self._context) ** 2, [0.0] * len(self.tiers))
        self._context = context
        noise = NOISE if self.counts[place] else FIRST_NOISE
        surprise = math.log(seconds) - self._logs[place]
        moved, self.surprises[tier] = self.surprises[tier], 0.0
        limit = max(SPIKE, 2 * math.sqrt(self._cov[place][place] + noise))
        # The first sample may have taken too long. If so, the second is shorter, and no spike.
        is_rated = self.counts[place] > (surprise < 0)
        is_spike = is_rated and abs(surprise + moved) > limit
        if is_spike and moved * surprise > 0:  # Two in a row are a change, and no spike.
            is_spike, self.changed = False, step
            self._widen(surprise**2, [surprise**2] * len(self.tiers))
        elif is_spike:
            surprise = math.copysign(SPIKE, surprise)
        gains = [row[place] for row in self._cov]
        total = gains[place] + noise
        if is_spike:
            self.surprises[tier] = surprise * gains[place] / total
        self.counts[place] += 1
        self.last[place] = step
        self._logs = [
            cost + gain / total * surprise for cost, gain in zip(self._logs, gains, strict=True)
        ]
        self._cov = [
            [value - gain / total * other for value, other in zip(row, gains, strict=True)]
            for row, gain in zip(self._cov, gains, strict=True)
        ]

    def age(self, step: int) -> None:
        """Let the variance grow up to this step."""
        passed = min(step - self._step, LONG)
        if passed <= 0:
            return
        self._step = step
        memory = [math.exp(min(self._logs[0] - cost, 0.0)) for cost in self._logs]
        for i, row in enumerate(self._cov):
            row[:] = [
                value + passed * (COMMON_DRIFT + MEMORY_DRIFT * memory[i] * other)
                for value, other in zip(row, memory, strict=True)
            ]
            row[i] += passed * OWN_DRIFT

    def is_known(self, tier: T) -> bool:
        """Whether a K has several samples, the newest of all K among them."""
        place = self.tiers.index(tier)
        return self.counts[place] > 1 and self.last[place] == max(self.last)

    @property
    def known(self) -> dict[T, tuple[float, bool]]:
        """What a later run may know of them."""
        counts = zip(self.tiers, self.counts, strict=True)
        return {tier: (self.seconds(tier), count > 1) for tier, count in counts}

    def seconds(self, tier: T) -> float:
        return math.exp(self._logs[self.tiers.index(tier)])

    def doubt(self, tier: T, other: T) -> float:
        """The standard error of the logarithm of the ratio of two K's costs."""
        i, j, cov = self.tiers.index(tier), self.tiers.index(other), self._cov
        return math.sqrt(max(cov[i][i] + cov[j][j] - 2 * cov[i][j], 0.0))
