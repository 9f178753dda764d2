"""Chooses K, the number of drafts of the next decode step, for a program with several K.

A prefill step always has the largest K, also for the decoding requests that share it.

A step with K drafts takes T(K) seconds and emits L(K) tokens per request: one, and the accepted
drafts (`accepted`). The best K has the largest L(K) / T(K). More drafts pay off with few requests,
when reading the weights dominates the cost of a step. They do not when the processor is the limit,
or when the text is hard to predict. The engine measures T and L as it runs. L is the mean of the
requests that run, each by what it accepted itself where requests differ.

Costs are kept per *cell*: a bucket, and the magnitude of the requests' lengths (`costs`). Trying a
K that is not the best one costs time. The policy counts the time lost so. It tries others only
where they may be better, for all that is known, and while that stays a small share of all time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from mtpc.engine.accepted import Acceptance, Experience
from mtpc.engine.costs import StepCosts

if TYPE_CHECKING:
    from mtpc.engine.request import Request

GAIN = 0.02
"""A K is tried if it may give more tokens per second by this share."""
BUDGET = 0.01
"""The share of decode time that trials may lose."""
CREDIT = 1.0
"""Steps that trials may lose before any time has passed."""
PROBE = 24
"""Steps without a verified draft after which the policy tries one draft, because texts change."""
DOUBT = 1.0
"""Standard errors by which a K may be better than it seems, where a trial is weighed."""
TRIAL = 3
"""Steps of a trial: the first one with more drafts than before verifies no more of them."""
_CLASS_TOKENS = 512
"""Tokens per request of the first class of lengths; each class after it ends at twice as many."""

Cell = tuple[int, int]
"""Rows of a bucket, and the class of the requests' mean length."""


class TierPolicy:
    """Chooses K for each decode step from measured costs and acceptance.

    Args:
        tiers: the K for which the program has steps.

    Attributes:
        tiers: the same, ascending.
        current: the K that the policy prefers.
        switches: number of times that `current` changed.
        steps: number of decode steps with a choice.
        spent: seconds in decode steps.
        lost: seconds that trials took, beyond what their tokens take at the preferred K.
    """

    def __init__(self, tiers: Sequence[int]):
        self.tiers = tuple(sorted(set(tiers)))
        self.current = self.tiers[0]
        self.switches = self.steps = 0
        self.spent = self.lost = 0.0
        self._costs: dict[Cell, StepCosts] = {}
        self.experience = Experience(self.tiers[-1])
        self._unverified, self._waited = 0, 0.0
        self._trial: int | None = None
        self._left = 0
        self._gained = self._verified = 0.0
        self._lengths = self._doubted = self.experience.lengths(())

    def use(self, tiers: Sequence[int]) -> None:
        """Choose among these K from the next step on; what drafts are accepted stays known."""
        self.tiers = tuple(sorted(set(tiers)))
        self._costs.clear()
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
        costs = self._known(cell)
        self._lengths = self.experience.lengths(each)
        if costs is None:
            return self.current
        costs.age(self.steps)
        self._doubted = self.experience.lengths(each, DOUBT)
        gains = {tier: self._gain(costs, tier) for tier in self.tiers}
        best = max(self.tiers, key=gains.__getitem__)
        # The policy changes K when not doing it has lost as much as going there and back does.
        lost = costs.seconds(self.current) * (1 - math.exp(gains[self.current] - gains[best]))
        self._waited = self._waited + lost if best != self.current else 0.0
        if best != self.current and self._waited >= self._change_cost(costs, best):
            self.current, self._waited = best, 0.0
            self.switches += 1
        self._trial = self._next_trial(costs)
        return self.current if self._trial is None else self._trial

    def _next_trial(self, costs: StepCosts) -> int | None:
        """Another K than the preferred one to try now, or None."""
        if self._trial not in (None, self.current) and (self._left > 0 or self._pays()):
            self._left -= 1
            return self._trial
        place = self.tiers.index(self.current)
        if costs.counts[place] < 2 or costs.last[place] < max(costs.last):
            return None  # The preferred K must be known now, to compare with.
        allowed = BUDGET * self.spent + CREDIT * costs.seconds(self.current)
        near = {max(place - 1, 0), min(place + 1, len(self.tiers) - 1)} - {place}
        for other in sorted(near, key=costs.last.__getitem__):  # The one that waits longest.
            tier = self.tiers[other]
            is_stale = tier > self.current == 0 and self._unverified >= PROBE
            if not is_stale and self._at_best(costs, tier) <= GAIN:
                continue
            self._left = TRIAL - 1
            return tier if self.lost + self._trial_cost(costs, tier) <= allowed else None
        return None

    def _trial_cost(self, costs: StepCosts, tier: int) -> float:
        """The seconds that a trial is expected to lose."""
        each = costs.seconds(tier) * (1 - math.exp(min(self._relative(costs, tier), 0.0)))
        return TRIAL * each + self._change_cost(costs, tier)

    def _change_cost(self, costs: StepCosts, tier: int) -> float:
        """The seconds lost by going from one K to another and back.

        The first step of the larger K verifies no more drafts than the smaller one proposes.
        """
        low, high = sorted((tier, self.current))
        return costs.seconds(high) * (1 - self._lengths[low] / self._lengths[high])

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
        self.spent += seconds
        if len(self.tiers) == 1:
            return
        cell = _cell(num_reqs, context)
        costs = self._costs.get(cell)
        if costs is None:
            near = self._nearest(cell)
            self._costs[cell] = costs = StepCosts(self.tiers, tier, seconds, self.steps, near)
        else:
            costs.add(tier, seconds, self.steps)
        self.steps += 1
        if self._trial is not None and tier == self._trial:
            tokens = 1 + (self._gained / num_reqs if self._verified else 0.0)
            plain = costs.seconds(self.current) / self._lengths[self.current]
            self.lost += max(seconds - tokens * plain, 0.0)
            if tier < self.current and self._left == TRIAL - 1:
                self.lost += self._change_cost(costs, tier)
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
        if len(self.tiers) == 1:
            return
        self._gained = self._verified = 0.0
        for (verified, accepted), own in zip_longest(drafts, each):
            self._gained += accepted
            self._verified += verified > 0
            if verified:
                self.experience.add(verified, accepted, own)

    def _gain(self, costs: StepCosts, tier: int) -> float:
        """The logarithm of L(K) / T(K)."""
        return math.log(self._lengths[tier]) - costs.log(tier)

    def _relative(self, costs: StepCosts, tier: int) -> float:
        """How much more tokens per second a K gives than the preferred one, as a logarithm."""
        return self._gain(costs, tier) - self._gain(costs, self.current)

    def _at_best(self, costs: StepCosts, tier: int) -> float:
        """The same at most, as far as is known.

        Of more drafts more may be accepted than of the few that were verified.
        """
        more = self._relative(costs, tier) + DOUBT * costs.doubt(tier, self.current)
        if tier > self.current:
            more += math.log(self._doubted[tier] / self._lengths[tier])
        return more

    def _known(self, cell: Cell) -> StepCosts | None:
        """The costs of a cell, or of the nearest one."""
        return self._costs.get(cell) or self._nearest(cell)

    def _nearest(self, cell: Cell) -> StepCosts | None:
        near = min(self._costs, key=lambda other: _distance(cell, other), default=None)
        return None if near is None else self._costs[near]


def context_of(requests: Iterable[Request]) -> int:
    """Tokens of all requests together."""
    return sum(request.num_tokens for request in requests)


def _cell(num_reqs: int, context: int) -> Cell:
    return num_reqs, (context // max(num_reqs, 1) // _CLASS_TOKENS).bit_length()


def _distance(one: Cell, other: Cell) -> tuple[float, int]:
    """How far cells are apart: first by requests, as a ratio, then by length."""
    ratio = max(one[0], other[0]) / min(one[0], other[0])
    return ratio, abs(one[1] - other[1])
