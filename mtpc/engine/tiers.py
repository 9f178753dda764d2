"""Chooses K, the number of drafts of the next decode step, for a program with several K.

A prefill step always has the largest K, also for the decoding requests that share it.

A step with K drafts takes T(K) seconds and emits L(K) tokens per request: one, and the accepted
drafts (`accepted`). The best K has the largest L(K) / T(K). More drafts pay off with few requests,
when reading the weights dominates the cost of a step. They do not when the processor is the limit,
or when the text is hard to predict. The engine measures T and L as it runs. L is the mean of the
requests that run, each by what it accepted itself where requests differ.

Costs are measured per *cell*: a bucket, and the magnitude of the requests' lengths. A K without a
measurement is predicted: on the line through two measured K of the cell, or else from the nearest
cell. Trying a K that is not the best one costs time. The policy counts the time lost so, and tries
others only while that stays a small share of all decode time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from mtpc.engine.accepted import Acceptance, Experience

if TYPE_CHECKING:
    from mtpc.engine.request import Request

GAIN = 1.02
"""The policy switches only if it expects tokens per second to grow by this factor, because
measurements are noisy."""
BUDGET = 0.01
"""The share of decode time that trials may lose."""
CREDIT = 1.0
"""Steps that trials may lose before any time has passed."""
PROBE = 24
"""Steps without a verified draft after which the policy tries one draft, because texts change."""
_COST_MEMORY = 0.9
"""Weight of the old value in the moving average of a cost."""
DOUBT = 1.0
"""Standard errors by which an acceptance may be larger than it seems, where a trial is weighed."""
REFRESH = 128
"""A K that was measured this many steps ago is measured again; one that gives half of the preferred
one's tokens per second, after four times as many."""
_SPIKE = 1.1
"""A sample counts as at most this multiple of the cost, and at least its inverse: other processes
use the processor, too."""
_CLASS_TOKENS = 512
"""Tokens per request of the first class of lengths; each class after it ends at twice as many."""

Cell = tuple[int, int]
"""Rows of a bucket, and the class of the requests' mean length."""


@dataclass
class Cost:
    """The moving average of a K's seconds, over `count` samples; the last was of step `step`."""

    seconds: float
    step: int
    count: int = 1

    def add(self, seconds: float, step: int) -> None:
        """Enter a sample of a step.

        The second one replaces the first, which warmed up caches, and any one replaces old ones.
        """
        if step - self.step >= REFRESH:
            self.count = 1
        if self.count == 1:
            self.seconds = seconds
        else:
            memory = min(_COST_MEMORY, 1 - 1 / self.count)
            within = min(max(seconds, self.seconds / _SPIKE), self.seconds * _SPIKE)
            self.seconds = memory * self.seconds + (1 - memory) * within
        self.count += 1
        self.step = step


class TierPolicy:
    """Chooses K for each decode step from measured costs and acceptance.

    Args:
        tiers: the K for which the program has steps.

    Attributes:
        tiers: the same, ascending.
        current: the K that the policy prefers.
        switches: number of times that `current` changed.
        steps: number of decode steps.
        spent: seconds in decode steps.
        lost: seconds that trials took, beyond what their tokens take at the preferred K.
    """

    def __init__(self, tiers: Sequence[int]):
        self.tiers = tuple(sorted(set(tiers)))
        self.current = self.tiers[0]
        self.switches = self.steps = 0
        self.spent = self.lost = 0.0
        self._costs: dict[Cell, dict[int, Cost]] = {}
        self.experience = Experience(self.tiers[-1])
        self._unverified = 0
        self._trial: int | None = None
        self._gained = self._verified = 0.0
        self._lengths = self._doubted = self.experience.lengths(())

    def use(self, tiers: Sequence[int]) -> None:
        """Choose among these K from the next step on; what was learnt stays."""
        self.tiers = tuple(sorted(set(tiers)))
        self.experience.count = self.tiers[-1]
        self._lengths = self._doubted = self.experience.lengths(())
        self._trial = None
        if self.current not in self.tiers:
            self.current = self.tiers[0]

    def choose(self, num_reqs: int, context: int = 0, each: Sequence[Acceptance] = ()) -> int:
        """K of the next decode step.

        Args:
            num_reqs: rows of the step's bucket.
            context: tokens of all its requests.
            each: what its requests accepted.
        """
        if len(self.tiers) == 1:
            return self.current
        cell = _cell(num_reqs, context)
        self._lengths = self.experience.lengths(each)
        self._doubted = self.experience.lengths(each, DOUBT)
        rates = {tier: self.rate(cell, tier) for tier in self.tiers}
        best = max(self.tiers, key=rates.__getitem__)
        # In doubt the policy takes fewer drafts, so that it does not lose to plain decoding.
        gain = 1.0 if best < self.current else GAIN
        if rates[best] > gain * rates[self.current]:
            self.current = best
            self.switches += 1
        self._trial = self._next_trial(cell, rates)
        return self.current if self._trial is None else self._trial

    def _next_trial(self, cell: Cell, rates: dict[int, float]) -> int | None:
        """Another K than the preferred one to try now, or None."""
        best = rates[self.current]
        if self._trial is not None and self._pays():
            return self._trial
        costs = self._costs.get(cell, {})
        if self.current not in costs or costs[self.current].count < 2:
            return None  # The preferred K must be known first, to compare with.
        allowed = BUDGET * self.spent + CREDIT * costs[self.current].seconds
        place = self.tiers.index(self.current)
        for tier in (*self.tiers[place + 1 : place + 2], *self.tiers[max(place - 1, 0) : place]):
            known = costs.get(tier)
            is_known = known is not None and known.count > 1
            is_stale = tier > self.current == 0 and self._unverified >= PROBE
            if known is not None:
                is_stale |= (self.steps - known.step) * (rates[tier] / best) ** 2 >= REFRESH
            if not is_stale and self._at_best(cell, tier, is_known) <= GAIN * best:
                continue
            seconds = self.cost(cell, tier)
            if self.lost + max(seconds - self._lengths[tier] / best, 0.0) <= allowed:
                return tier
        return None

    def _pays(self) -> bool:
        """Whether a trial of drafts at K = 0 goes on: what it verified was accepted, or is still
        to be verified."""
        if self._trial is None or self.current or self._trial == 0:
            return False
        return self._gained >= self._verified

    def observe(self, num_reqs: int, tier: int, seconds: float, context: int = 0) -> None:
        """Record the cost of a decode step.

        Args:
            num_reqs: rows of the step's bucket.
            tier: the step's K.
            seconds: duration of the replay.
            context: tokens of all its requests.
        """
        cell = _cell(num_reqs, context)
        costs = self._costs.setdefault(cell, {})
        if tier in costs:
            costs[tier].add(seconds, self.steps)
        else:
            costs[tier] = Cost(seconds, self.steps)
        self.steps += 1
        self.spent += seconds
        if self._trial is not None and tier == self._trial:
            tokens = 1 + (self._gained / num_reqs if self._verified else 0.0)
            self.lost += max(seconds - tokens / self.rate(cell, self.current), 0.0)
        self._unverified = 0 if self._verified else self._unverified + 1

    def observe_drafts(
        self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()
    ) -> None:
        """Record which drafts a decode or prefill step accepted.

        Args:
            drafts: for each decoding request, the number of drafts verified (fewer than K after a
                step that proposed fewer) and the number accepted.
            each: what these requests accepted so far; this adds to it.
        """
        self._gained = self._verified = 0.0
        for (verified, accepted), own in zip_longest(drafts, each):
            self._gained += accepted
            self._verified += verified > 0
            if verified:
                self.experience.add(verified, accepted, own)

    def rate(self, cell: Cell, tier: int) -> float:
        """The expected tokens per second for each request: L(K) / T(K)."""
        return self._lengths[tier] / self.cost(cell, tier)

    def _at_best(self, cell: Cell, tier: int, is_known: bool) -> float:
        """The largest tokens per second that a K may have, as far as is known.

        More drafts take no less time, and no more than in proportion to a request's rows. Of more
        drafts more may be accepted than of the few that were verified.
        """
        costs = self._costs[cell]
        least = max(
            cost.seconds * min(1.0, (tier + 1) / (other + 1)) for other, cost in costs.items()
        )
        tokens = self._doubted[tier] if tier > self.current else self._lengths[tier]
        return tokens / (self.cost(cell, tier) if is_known else least)

    def cost(self, cell: Cell, tier: int) -> float:
        """T(K): measured, or predicted."""
        costs = self._costs.get(cell, {})
        if tier in costs:  # Fewer drafts take no more time, whatever noise says.
            return min(cost.seconds for other, cost in costs.items() if other >= tier)
        if len(costs) > 1:
            return self._on_line(costs, tier)
        near = self._nearest(cell)
        if near is None:
            # Nothing is known. Half of a step's time for its weights is a middling guess.
            (known, cost), *_ = costs.items() or [(0, Cost(1.0, 0))]
            return cost.seconds * (3 + tier) / (3 + known)
        found = self.cost(near, tier)
        if costs:
            (known, cost), *_ = costs.items()
            found *= cost.seconds / self.cost(near, known)
        return found

    def _on_line(self, costs: dict[int, Cost], tier: int) -> float:
        """A cost on the line through the two nearest measured K."""
        low, high = sorted(sorted(costs, key=lambda known: abs(known - tier))[:2])
        slope = (costs[high].seconds - costs[low].seconds) / (high - low)
        return max(costs[low].seconds + slope * (tier - low), 0.5 * costs[low].seconds)

    def _nearest(self, cell: Cell) -> Cell | None:
        """The cell nearest to this one, of those with two measured K; None: there is none."""
        known = [other for other, costs in self._costs.items() if len(costs) > 1 and other != cell]
        return min(known, key=lambda other: _distance(cell, other), default=None)


def context_of(requests: Iterable[Request]) -> int:
    """Tokens of all requests together."""
    return sum(request.num_tokens for request in requests)


def _cell(num_reqs: int, context: int) -> Cell:
    return num_reqs, (context // max(num_reqs, 1) // _CLASS_TOKENS).bit_length()


def _distance(one: Cell, other: Cell) -> tuple[float, int]:
    """How far cells are apart: first by requests, as a ratio, then by length."""
    ratio = max(one[0], other[0]) / min(one[0], other[0])
    return ratio, abs(one[1] - other[1])
