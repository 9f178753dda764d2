"""How many drafts the next decode step verifies, where a program has some for several numbers.

A prefill step has the largest number; who joins it verifies as many.

A step of K drafts costs T(K) and hands out L(K) tokens a request: 1 and the drafts accepted, L(K) =
1 + sum over i <= K of a_1 ... a_i, with a_i the share of drafts at position i that are accepted
when all before them are. The best K has the largest L(K) / T(K): more drafts pay while requests
are few, when a step costs about what reading the weights costs, and cease to when the processor
is the limit, or when the text is hard to predict. Both are measured as the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GAIN = 1.05
"""A switch must promise this much more tokens per second: measurements are noisy."""
DWELL = 8
"""Steps between switches, at least."""
PROBE, PROBE_STEPS = 64, 3
"""Steps after which all positions are tried again, if some were not, for texts change; and how many
steps a probe takes, of which the first only proposes what the others verify."""
_COST_MEMORY, _ACCEPTANCE_MEMORY = 0.8, 0.95
_SAMPLES = 2
"""Steps of a tier before its cost is believed: the first one warms caches up."""


class TierPolicy:
    """Chooses K for each step, from measured costs and acceptance.

    Args:
        tiers: numbers of drafts that steps exist for.
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
        """K of the next step, of a bucket of `num_reqs` requests."""
        for tier in reversed(self.tiers):  # Every cost must be known before one is preferred.
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
        """Learn what a step costs.

        Args:
            num_reqs: of its bucket.
            tier: its K.
            seconds: that its replay took.
        """
        count, cost = self._costs.get((num_reqs, tier), (0, seconds))
        if count:  # The first sample is kept only until there is another.
            memory = _COST_MEMORY if count >= _SAMPLES else 0.0
            cost = memory * cost + (1 - memory) * seconds
        self._costs[num_reqs, tier] = (count + 1, cost)
        self._since_switch += 1
        at_top = tier == self.tiers[-1]
        self._since_top = 0 if at_top else self._since_top + 1
        self._probing = self._probing + 1 if at_top else 0

    def observe_drafts(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Learn what became of the drafts of a step, of either kind.

        Args:
            drafts: per request how many real drafts it verified (fewer than K after a step that
                proposed fewer), and how many of them were accepted.
        """
        for verified, accepted in drafts:
            for position in range(min(verified, accepted + 1)):
                self._tried[position] = _ACCEPTANCE_MEMORY * self._tried[position] + 1
                was_accepted = position < accepted
                self._accepted[position] *= _ACCEPTANCE_MEMORY
                self._accepted[position] += was_accepted

    def acceptance(self, position: int) -> float:
        """Share of drafts at a position (from 0) accepted when all before them are.

        Where none was tried yet: that of the position before, and a half to begin with.
        """
        if self._tried[position]:
            return self._accepted[position] / self._tried[position]
        return self.acceptance(position - 1) if position else 0.5

    def length(self, tier: int) -> float:
        """Tokens that a step of K drafts is expected to hand out per request."""
        tokens = reached = 1.0
        for position in range(tier):
            reached *= self.acceptance(position)
            tokens += reached
        return tokens

    def rate(self, num_reqs: int, tier: int) -> float:
        """Expected tokens per second and request."""
        return self.length(tier) / self._costs[num_reqs, tier][1]
