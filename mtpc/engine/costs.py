"""What a decode step costs with each K, while the machine gets slower and faster.

A K is measured only when it runs, and others must be compared with it then. So the costs of all K
are one estimate: the logarithms of their seconds, with a covariance (a Kalman filter). A step
corrects the cost of its own K, and those of the others as far as they move together. Machines get
slower in two ways: all of a step does, or what it reads of memory at any K. Between steps the
covariance grows along both, and a little for each K by itself: what was measured long ago is in
doubt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NOISE, FIRST_NOISE = 0.04**2, 0.3**2
"""Variance of a sample's logarithm; and of a K's first sample in a cell, which warms up caches."""
COMMON_DRIFT, MEMORY_DRIFT, OWN_DRIFT = 0.05**2, 0.02**2, 0.01**2
"""Growth of the variance a step: of all K alike, of what they all read, and of each K by itself.
The first is large, because requests come and go within a cell, and harmless: it changes no
comparison."""
SLOPE, BEND = 0.29**2, 0.05**2
"""Variance of what is believed of a K that was never measured: of the share of a step's time that
a row costs, and of each K by itself."""
SPIKE = 0.15
"""The largest surprise, as a logarithm, that counts where no more was in doubt: other processes use
the processor, too. A second one in a row counts in full: all K alike have changed by as much, or
each by itself."""
LONG = 1000
"""Steps after which doubt grows no more."""


class StepCosts:
    """The costs of the steps of one cell.

    Args:
        tiers: ascending.
        tier: K of the first sample.
        seconds: the first sample.
        step: its number.
        like: the costs of a cell near to this one, or None.

    Attributes:
        counts: number of samples, by place in `tiers`.
        last: the step of the last sample, or -1.
        changed: the step in which costs changed at once, or the first one.
        surprises: by K how far the last sample moved its logarithm, if that was a spike, else 0.
    """

    def __init__(
        self, tiers: Sequence[int], tier: int, seconds: float, step: int, like: StepCosts | None
    ):
        self.tiers, self._step = tuple(tiers), step
        self.counts = [0] * len(self.tiers)
        self.last = [-1] * len(self.tiers)
        self.changed = step
        self.surprises = dict.fromkeys(self.tiers, 0.0)
        self._logs: list[float]
        self._cov: list[list[float]]
        place, size = self.tiers.index(tier), range(len(self.tiers))
        if like is None:
            # A further row costs from nothing to a whole step's time. A third is a middling guess.
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

    def _add_common(self, variance: float) -> None:
        for row in self._cov:
            row[:] = [value + variance for value in row]

    def add(self, tier: int, seconds: float, step: int) -> None:
        """Enter a sample of a step."""
        self.age(step)
        place = self.tiers.index(tier)
        noise = NOISE if self.counts[place] else FIRST_NOISE
        surprise = math.log(seconds) - self._logs[place]
        moved, self.surprises[tier] = self.surprises[tier], 0.0
        limit = max(SPIKE, 2 * math.sqrt(self._cov[place][place] + noise))
        is_spike = self.counts[place] > 1 and abs(surprise + moved) > limit
        if is_spike and moved * surprise > 0:  # Two in a row are none.
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
        """Doubt grows up to this step."""
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
        """Whether a K was measured more than once, and last of all."""
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
