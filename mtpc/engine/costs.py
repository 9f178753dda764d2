"""Estimates what a decode step costs with each K, while the machine's speed changes.

A step measures only its own K, but the costs of all K must be compared. So they are one estimate:
the logarithms of their seconds, with a covariance (a Kalman filter). A step corrects the cost of
its own K, and the other costs as far as they move together with it. A machine gets slower in two
ways: everything takes longer, or only the memory reads that every K has. Between steps the
covariance grows in both directions, and a little for each K by itself, because older measurements
are less certain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOISE, FIRST_NOISE = 0.04**2, 0.3**2
"""Variance of a sample's logarithm, and of the first sample of a K in a cell, which warms up
caches."""
COMMON_DRIFT, MEMORY_DRIFT, OWN_DRIFT = 0.05**2, 0.055**2, 0.01**2
"""Growth of the variance in a step: of all K alike, of the memory reads that they share, and of
each K by itself. The first two are about equally likely: a slower step of the smallest K is laid to
each of them by half, until a step of another K tells them apart."""
SLOPE, BEND = 0.29**2, 0.05**2
"""Variance of the estimate for a K that was never measured: of the share of a step's time that a
row costs, and of each K by itself."""
SPIKE = 0.15
"""A surprise, as a logarithm, counts up to this much if the estimate was more certain than that:
other processes may have used the processor. A second surprise in a row counts in full, because the
costs have changed, of all K alike or of this K alone."""
LONG = 1000
"""After so many steps without a sample, the variance stops growing."""
MEASURED, GUESSED = 0.05**2, 0.3**2
"""Variance of the cost of each K by itself, from an earlier run that measured it, or did not."""

Place = tuple[int, int]
"""The place of a cell: rows of a bucket, and the class of the requests' mean length."""


@dataclass(frozen=True)
class EarlierCosts:
    """What the steps of a cell took in an earlier run.

    Attributes:
        seconds: of a step, by K.
        measured: the K that ran several times there; the others are guesses from these.
    """

    seconds: Mapping[int, float]
    measured: frozenset[int]


class StepCosts:
    """The costs of the steps of one cell.

    Args:
        tiers: ascending.
        tier: K of the first sample.
        seconds: the first sample.
        step: its number.
        like: the costs of a nearby cell, or None.

    Attributes:
        counts: number of samples, by place in `tiers`.
        last: the step of the last sample, or -1.
        changed: the step of the last sudden change of costs; at first, the first step.
        surprises: for each K, how far its last sample moved its logarithm if it was a spike, else
            0.
    """

    def __init__(
        self, tiers: Sequence[int], tier: int, seconds: float, step: int, like: StepCosts | None
    ):
        self.tiers, self._step = tuple(tiers), step
        self.counts = [0] * len(self.tiers)
        self._context = 0
        self.last = [-1] * len(self.tiers)
        self.changed = step
        self.surprises = dict.fromkeys(self.tiers, 0.0)
        self._logs: list[float]
        self._cov: list[list[float]]
        place, size = self.tiers.index(tier), range(len(self.tiers))
        if like is None:
            # One more row may cost nothing, or as much as a whole step. A third is between these.
            logs = [math.log((3 + k) / (3 + tier)) for k in self.tiers]
            steps = [3 * k / (3 + k) - 3 * tier / (3 + tier) for k in self.tiers]
            self._cov = [[SLOPE * steps[i] * steps[j] for j in size] for i in size]
        else:
            logs = [cost - like._logs[place] for cost in like._logs]
            between = like._cov
            self._cov = [
                [
                    between[i][j] - between[i][place] - between[place][j] + between[place][place]
                    for j in size
                ]
                for i in size
            ]
        for i in size:
            self._cov[i][i] += BEND * (i != place)
        self._logs = [math.log(seconds) + cost for cost in logs]
        self._add_common(FIRST_NOISE)
        self.counts[place], self.last[place] = 1, step

    @classmethod
    def of_earlier_run(cls, found: EarlierCosts) -> StepCosts:
        """The costs of an earlier run. All of the machine may be slower or faster now."""
        tiers = sorted(found.seconds)
        costs = cls(tiers, tiers[0], found.seconds[tiers[0]], 0, None)
        costs.counts = [2 * (tier in found.measured) for tier in tiers]
        costs.last, costs.changed = [-1] * len(tiers), -1
        costs._logs = [math.log(found.seconds[tier]) for tier in tiers]
        costs._cov = [[0.0] * len(tiers) for _ in tiers]
        for place, count in enumerate(costs.counts):
            costs._cov[place][place] = MEASURED if count else GUESSED
        costs._add_common(FIRST_NOISE)
        return costs

    @property
    def for_later_runs(self) -> EarlierCosts:
        """What a later run may know of them."""
        measured = (k for k, count in zip(self.tiers, self.counts, strict=True) if count > 1)
        return EarlierCosts({k: self.seconds(k) for k in self.tiers}, frozenset(measured))

    def _add_common(self, variance: float) -> None:
        for row in self._cov:
            row[:] = [value + variance for value in row]

    def add(self, tier: int, seconds: float, step: int, context: int = 0) -> None:
        """Enter a sample of a step.

        If the tokens of all its requests differ from the last step's, requests came or went. The
        cost of all K may differ as much, and that is no surprise.
        """
        self.age(step)
        if context and self._context:
            self._add_common(math.log(context / self._context) ** 2)
        self._context = context
        place = self.tiers.index(tier)
        noise = NOISE if self.counts[place] else FIRST_NOISE
        surprise = math.log(seconds) - self._logs[place]
        moved, self.surprises[tier] = self.surprises[tier], 0.0
        limit = max(SPIKE, 2 * math.sqrt(self._cov[place][place] + noise))
        # The first sample may have taken too long. If so, the second is shorter, and no spike.
        is_rated = self.counts[place] > (surprise < 0)
        is_spike = is_rated and abs(surprise + moved) > limit
        if is_spike and moved * surprise > 0:  # Two in a row are a change, and no spike.
            is_spike, self.changed = False, step
            self._add_common(surprise**2)
            for i, row in enumerate(self._cov):
                row[i] += surprise**2
        elif is_spike:
            surprise = math.copysign(SPIKE, surprise)
        gains = [row[place] for row in self._cov]
        total = gains[place] + noise
        if is_spike:
            self.surprises[tier] = surprise * gains[place] / total
        self.counts[place] += 1
        self.last[place] = step
        for i, gain in enumerate(gains):
            share = gain / total
            self._logs[i] += share * surprise
            row = self._cov[i]
            row[:] = [value - share * other for value, other in zip(row, gains, strict=True)]

    def age(self, step: int) -> None:
        """Let the variance grow up to this step."""
        passed = min(step - self._step, LONG)
        if passed <= 0:
            return
        self._step, least = step, self._logs[0]
        memory = [math.exp(min(least - cost, 0.0)) for cost in self._logs]
        for i, row in enumerate(self._cov):
            for j, other in enumerate(memory):
                row[j] += passed * (COMMON_DRIFT + MEMORY_DRIFT * memory[i] * other)
            row[i] += passed * OWN_DRIFT

    def is_known(self, tier: int) -> bool:
        """Whether a K has several samples, the newest of all K among them."""
        place = self.tiers.index(tier)
        return self.counts[place] > 1 and self.last[place] == max(self.last)

    def log(self, tier: int) -> float:
        """The logarithm of a K's seconds."""
        return self._logs[self.tiers.index(tier)]

    def seconds(self, tier: int) -> float:
        """A K's seconds."""
        return math.exp(self.log(tier))

    def doubt(self, tier: int, other: int) -> float:
        """The standard error of the logarithm of the ratio of two K's costs."""
        i, j, cov = self.tiers.index(tier), self.tiers.index(other), self._cov
        return math.sqrt(max(cov[i][i] + cov[j][j] - 2 * cov[i][j], 0.0))
