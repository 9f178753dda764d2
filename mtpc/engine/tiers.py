"""Chooses K, the number of drafts of the next decode step, for a program with several K.

A prefill step always has the largest K, also for the decoding requests that share it.

A step with K drafts takes T(K) seconds and emits L(K) tokens per request: one, and the accepted
drafts. L(K) = 1 + the sum over i <= K of a_1 * ... * a_i. Here a_i is the share of drafts at
position i that are accepted, given that all drafts before them are. The best K has the largest
L(K) / T(K). More drafts pay off with few requests, when reading the weights dominates the cost of a
step. They do not when the processor is the limit, or when the text is hard to predict. The engine
measures T and a_i as it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GAIN = 1.05
"""The policy switches only if it expects tokens per second to grow by this factor, because
measurements are noisy."""
DWELL = 8
"""The fewest steps between two switches."""
PROBE, PROBE_STEPS = 64, 3
"""After PROBE steps without the largest K, the policy tries it again for PROBE_STEPS steps, because
texts change. The first of these steps only proposes the drafts that the next ones verify."""
_COST_MEMORY, _ACCEPTANCE_MEMORY = 0.8, 0.95
"""Weights of the old value in the moving averages of costs and of acceptance."""
_SAMPLES = 2
"""Steps of a tier before the policy trusts its cost. The first step warms up caches."""


class TierPolicy:
    """Chooses K for each decode step from measured costs and acceptance.

    Args:
        tiers: the K for which the program has steps.

    Attributes:
        tiers: the same, ascending.
        current: the K that the policy prefers.
        switches: number of times that `current` changed.
    """

    def __init__(self, tiers: Sequence[int]):
        self.tiers = tuple(sorted(set(tiers)))
        self.current = self.tiers[-1]
        self.switches = 0
        self._since_switch = self._since_top = self._probing = 0
        self._costs: dict[tuple[int, int], tuple[int, float]] = {}
        largest = self.tiers[-1]
        self._tried, self._accepted = [0.0] * largest, [0.0] * largest

    def choose(self, num_reqs: int) -> int:
        """K of the next decode step, for the bucket of `num_reqs` requests."""
        for tier in reversed(self.tiers):  # Measure every tier before preferring one.
            if self._costs.get((num_reqs, tier), (0, 0.0))[0] < _SAMPLES:
                return tier
        if self._since_top >= PROBE or 0 < self._probing < PROBE_STEPS:
            return self.tiers[-1]
        best = max(self.tiers, key=lambda tier: self.rate(num_reqs, tier))
        gain = self.rate(num_reqs, best) / self.rate(num_reqs, self.current)
        if best != self.current and gain > GAIN and self._since_switch >= DWELL:
            self.current, self._since_switch = best, 0
            self.switches += 1
        return self.current

    def observe(self, num_reqs: int, tier: int, seconds: float) -> None:
        """Record the cost of a decode step.

        Args:
            num_reqs: rows of the step's bucket.
            tier: the step's K.
            seconds: duration of the replay.
        """
        count, cost = self._costs.get((num_reqs, tier), (0, seconds))
        if count:  # The second sample replaces the first; later ones enter an average.
            memory = _COST_MEMORY if count >= _SAMPLES else 0.0
            cost = memory * cost + (1 - memory) * seconds
        self._costs[num_reqs, tier] = (count + 1, cost)
        self._since_switch += 1
        at_top = tier == self.tiers[-1]
        self._since_top = 0 if at_top else self._since_top + 1
        self._probing = self._probing + 1 if at_top else 0

    def observe_drafts(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Record which drafts a decode or prefill step accepted.

        Args:
            drafts: for each decoding request, the number of drafts verified (fewer than K after a
                step that proposed fewer) and the number accepted.
        """
        for verified, accepted in drafts:
            for position in range(min(verified, accepted + 1)):
                self._tried[position] = _ACCEPTANCE_MEMORY * self._tried[position] + 1
                was_accepted = position < accepted
                self._accepted[position] *= _ACCEPTANCE_MEMORY
                self._accepted[position] += was_accepted

    def acceptance(self, position: int) -> float:
        """The share of drafts at a position accepted, given that all drafts before them are.

        A position without a measurement takes the value of the position before it, or 0.5.

        Args:
            position: draft position, from 0.
        """
        if self._tried[position]:
            return self._accepted[position] / self._tried[position]
        return self.acceptance(position - 1) if position else 0.5

    def length(self, tier: int) -> float:
        """The expected number of tokens per request of a step with `tier` drafts: L(K)."""
        tokens = reached = 1.0
        for position in range(tier):
            reached *= self.acceptance(position)
            tokens += reached
        return tokens

    def rate(self, num_reqs: int, tier: int) -> float:
        """The expected tokens per second for each request: L(K) / T(K)."""
        return self.length(tier) / self._costs[num_reqs, tier][1]
