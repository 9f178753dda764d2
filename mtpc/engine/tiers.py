"""Chooses K, the number of drafts of the next decode step, for a program with several K.

A prefill step always has the largest K, also for the decoding requests that share it.

A step with K drafts takes T(K) seconds and emits L(K) tokens per request: one, and the accepted
drafts (`accepted`). The best K has the largest L(K) / T(K). More drafts pay off with few requests,
when reading the weights dominates the cost of a step. They do not when the processor is the limit,
or when the text is hard to predict. The engine measures T and L as it runs. L is the mean over the
running requests.

If requests differ, each has an L of its own, from what it accepted, and its tokens have a worth:
the part of a step that one of them usually takes. A request whose drafts are accepted needs few
steps, so its tokens are worth less. With equal worths the policy would draft too often: such
requests would end soon, for the price of slow steps of those that accept nothing, which remain.

Costs are kept per *cell*: a bucket, and the magnitude of the requests' lengths (`costs`). The graph
cache keeps them for later runs, which then choose well from their first step on. Costs change, and
so do texts. So the policy tries every K again and again. Two accounts, both in seconds, bound what
these trials cost:

- What trials lose, for each K of a cell. It stays below a small share of all time. If a cost is new
  or has suddenly changed, a trial may lose the time of one step in advance.
- What the policy loses to the smallest K (0, plain decoding): the time beyond what the same tokens
  take there. If it exceeds a small share of the recent time, the policy rests at the smallest K,
  whatever its estimates say.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpc.engine.accepted import Acceptance, Experience
from mtpc.engine.costs import EarlierCosts, Place, StepCosts

if TYPE_CHECKING:
    from mtpc.engine.request import Request

BUDGET = 0.006
"""The share of decode time that the trials of all K together may lose."""
CREDIT = 1.0
"""Trials of a K may lose the time of this many steps in advance if its cost is new or has suddenly
changed. So may the step of a trial that verifies the trial's drafts."""
TRIAL = 2
"""Steps of a trial of more drafts. The first of them verifies only the drafts of the step
before."""
FLOOR, RESTED = 0.03, 0.015
"""Shares of recent time lost to the smallest K. At the first, the engine rests at that K; at the
second, it goes on."""
SLACK = 2.0
"""The time of this many steps of the smallest K may be lost, too, because acceptance varies."""
RECENT, USUAL = 0.999, 0.99
"""The weight that older steps keep at each new step: in the account of losses to the smallest K,
and in the shares of steps that each K has."""
_CLASS_TOKENS = 512
"""Tokens per request of the first class of lengths; each class after it ends at twice as many."""


@dataclass
class _Cell:
    """What is known of the steps of one place.

    Attributes:
        costs: the costs of each K.
        allowed: seconds that trials of each K may lose; negative if they lost some in advance.
    """

    costs: StepCosts
    allowed: dict[int, float]


class TierPolicy:
    """Chooses K for each decode step from measured costs and acceptance.

    Args:
        tiers: the K for which the program has steps.
        known: costs from earlier runs.

    Attributes:
        tiers: the same, ascending.
        current: the K that the policy prefers.
        switches: number of times that `current` changed.
        steps: number of decode steps with a choice.
        spent: seconds in decode steps.
        lost: seconds that trials took, beyond what their tokens take at the preferred K.
        rests: whether the smallest K has been better lately than what the policy did.
    """

    def __init__(self, tiers: Sequence[int], known: Mapping[Place, EarlierCosts] | None = None):
        self.tiers, self._known = tuple(sorted(set(tiers))), dict(known or {})
        self.current = self.tiers[0]
        self.switches = self.steps = 0
        self.spent = self.lost = 0.0
        self.rests = False
        self.experience = Experience(self.tiers[-1])
        self._cells = self._known_cells()
        self._forget_shares()
        self._tokens, self._verified = 1.0, False
        self._waited = self._behind = self._recent = 0.0
        self._trial: int | None = None
        self._left, self._wins, self._idle = 0, False, False

    def use(self, tiers: Sequence[int]) -> None:
        """Choose among these K from the next step on. What is known of acceptance is kept."""
        self._known = self.costs()
        self.tiers = tuple(sorted(set(tiers)))
        self._cells = self._known_cells()
        self.experience.count = self.tiers[-1]
        self._forget_shares()
        self._trial = None
        if self.current not in self.tiers:
            self.current = self.tiers[0]

    def _forget_shares(self) -> None:
        self._shares = dict.fromkeys(self.tiers, 1 / len(self.tiers))
        self._weigh(())

    def costs(self) -> dict[Place, EarlierCosts]:
        """What this run and earlier ones know of costs, for later runs."""
        own = {place: cell.costs.for_later_runs for place, cell in self._cells.items()}
        return {**self._known, **own}

    def _known_cells(self) -> dict[Place, _Cell]:
        """Cells of earlier runs that had the same K."""
        return {
            place: _Cell(StepCosts.of_earlier_run(found), dict.fromkeys(self.tiers, 0.0))
            for place, found in self._known.items()
            if tuple(sorted(found.seconds)) == self.tiers
        }

    def choose(
        self, num_reqs: int, context: int = 0, each: Sequence[Acceptance] = (), idle: bool = False
    ) -> int:
        """K of the next decode step.

        Args:
            num_reqs: rows of the step's bucket.
            context: tokens of all its requests.
            each: the counts of what its requests accepted.
            idle: whether no request has a draft to verify, and a step of any K proposes the most.
        """
        if len(self.tiers) == 1:
            return self.current
        self._idle = idle
        if idle:
            return self.tiers[0]
        place = _place(num_reqs, context)
        cell = self._cells.get(place)
        near = cell or self._nearest(place)
        self._weigh(each)
        if near is None:
            return self.current
        near.costs.age(self.steps)
        self._prefer(near.costs)
        self._trial = None if self.rests or cell is None else self._next_trial(cell)
        if self.rests:
            return self.tiers[0]
        return self.current if self._trial is None else self._trial

    def _weigh(self, each: Sequence[Acceptance]) -> None:
        """Set what the requests' tokens are worth, 1 on average, and the expected tokens by K."""
        lengths = self.experience.lengths(each)
        steps = [1 / sum(s * own[k] for k, s in self._shares.items()) for own in lengths]
        worths = [value * len(steps) / sum(steps) for value in steps]
        self._lengths = [
            sum(map(operator.mul, worths, column)) / len(worths)
            for column in zip(*lengths, strict=True)
        ]
        for own, worth in zip(each, itertools.cycle(worths), strict=False):
            own.worth = worth

    def _prefer(self, costs: StepCosts) -> None:
        """Change the preferred K once waiting has lost as much time as a change there and back.

        The first step verifies drafts of a prefill step, which has the most: any K begins at once.
        """
        best = max(self.tiers, key=lambda tier: self._rate(costs, tier))
        if best == self.current or not self.steps:
            self.current, self._waited = best, 0.0
            return
        self._waited += costs.seconds(self.current) * (
            1 - self._rate(costs, self.current) / self._rate(costs, best)
        )
        if self._waited >= self._change_cost(costs, best):
            self.current, self._waited = best, 0.0
            self.switches += 1

    def _next_trial(self, cell: _Cell) -> int | None:
        """Another K than the preferred one to try now, or None."""
        costs, tier = cell.costs, self._trial
        if tier is not None and tier != self.current:
            # The last step shows what is accepted. A surprise gets a second sample, and a K that
            # wins goes on.
            is_open = self._wins or costs.surprises[tier] != 0
            is_cheap = self._loss(costs, tier) <= CREDIT * costs.seconds(self.current)
            if is_open or (self._left and is_cheap):
                self._left = max(self._left - 1, 0)
                return tier
        if not costs.is_known(self.current):
            return None
        left = {
            tier: self._allowed(cell, tier)
            - self._steps(tier) * self._loss(costs, tier)
            - self._change_cost(costs, tier)
            for tier in self.tiers
            if tier != self.current
        }
        tier = max(left, key=left.__getitem__)
        if left[tier] < 0:
            return None
        if tier < self.current:
            self._pay(cell, tier, self._change_cost(costs, tier))
        self._left, self._wins = self._steps(tier) - 1, False
        return tier

    def _steps(self, tier: int) -> int:
        """Steps of a trial. With fewer drafts than the preferred K, one step is enough."""
        return TRIAL if tier > self.current else 1

    def _loss(self, costs: StepCosts, tier: int) -> float:
        """The seconds that a step is expected to lose, if its K is better than it seems."""
        return costs.seconds(tier) * (1 - self._hope(costs, tier))

    def _hope(self, costs: StepCosts, tier: int) -> float:
        """A K's rate over the preferred one's, at most 1, if its cost is a standard error lower."""
        ratio = self._rate(costs, tier) / self._rate(costs, self.current)
        return min(ratio * math.exp(costs.doubt(tier, self.current)), 1.0)

    def _change_cost(self, costs: StepCosts, tier: int) -> float:
        """The seconds lost by going from the preferred K to another and back.

        The first step of the larger K verifies no more drafts than the smaller one proposes.
        """
        low, high = sorted((tier, self.current))
        return costs.seconds(high) * (1 - self._lengths[low] / self._lengths[high])

    def _allowed(self, cell: _Cell, tier: int) -> float:
        """Seconds that trials of a K may lose now; more if its cost is new or has changed."""
        is_new = cell.costs.last[self.tiers.index(tier)] < cell.costs.changed
        return cell.allowed[tier] + is_new * CREDIT * cell.costs.seconds(self.current)

    def _pay(self, cell: _Cell, tier: int, seconds: float) -> None:
        cell.allowed[tier] -= seconds
        self.lost += seconds

    def observe(self, num_reqs: int, tier: int, seconds: float, context: int = 0) -> None:
        """Record the cost of a decode step, after its drafts.

        Args:
            num_reqs: rows of the step's bucket.
            tier: the step's K.
            seconds: duration of the replay.
            context: tokens of all its requests.
        """
        self.spent += seconds
        if len(self.tiers) == 1:
            return
        place = _place(num_reqs, context)
        cell = self._cells.get(place)
        if cell is None:
            near = self._nearest(place)
            like = near.costs if near else None
            costs = StepCosts(self.tiers, tier, seconds, self.steps, like)
            self._cells[place] = cell = _Cell(costs, dict.fromkeys(self.tiers, 0.0))
        else:
            cell.costs.add(tier, seconds, self.steps, context)
        self.steps += 1
        for k in self.tiers:
            self._shares[k] += (1 - USUAL) * ((k == tier) - self._shares[k])
        share = BUDGET / (len(self.tiers) - 1) * seconds
        for other in self.tiers:
            if other != tier:  # A hopeless K gets little.
                cell.allowed[other] += share * self._hope(cell.costs, other)
        if tier != self.current and not (self.rests or self._idle):
            lost = seconds - self._tokens / self._rate(cell.costs, self.current)
            self._wins = self._verified and lost < 0
            self._pay(cell, tier, lost)
        self._compare(cell.costs, tier, seconds)

    def _compare(self, costs: StepCosts, tier: int, seconds: float) -> None:
        """Count what a step lost to the smallest K."""
        plain = self._rate(costs, self.tiers[0])
        lost = seconds - self._tokens / plain if tier > self.tiers[0] else 0.0
        self._behind = max(RECENT * self._behind + lost, 0.0)
        self._recent = RECENT * self._recent + seconds
        if self.rests:
            self.rests = self._behind > RESTED * self._recent
        else:
            self.rests = self._behind > FLOOR * self._recent + SLACK / plain

    def observe_drafts(
        self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()
    ) -> None:
        """Record which drafts a decode or prefill step accepted.

        Args:
            drafts: for each decoding request, the number of drafts verified (fewer than K after a
                step that proposed fewer) and the number accepted.
            each: the counts of these requests so far, or none; this adds to them.
        """
        if len(self.tiers) == 1:
            return
        drafts = list(drafts)
        self._verified = any(verified for verified, _ in drafts)
        each = list(each)
        worths = [own.worth for own in each] or [1.0] * len(drafts)
        accepted = sum(worth * right for worth, (_, right) in zip(worths, drafts, strict=True))
        self._tokens = 1 + accepted / (sum(worths) or 1.0)
        self.experience.add(drafts, each)

    def _rate(self, costs: StepCosts, tier: int) -> float:
        """Tokens per second: L(K) / T(K)."""
        return self._lengths[tier] / costs.seconds(tier)

    def _nearest(self, place: Place) -> _Cell | None:
        near = min(self._cells, key=lambda other: _distance(place, other), default=None)
        return None if near is None else self._cells[near]


def context_of(requests: Iterable[Request]) -> int:
    """Tokens of all requests together."""
    return sum(request.num_tokens for request in requests)


def _place(num_reqs: int, context: int) -> Place:
    return num_reqs, (context // max(num_reqs, 1) // _CLASS_TOKENS).bit_length()


def _distance(one: Place, other: Place) -> tuple[float, int]:
    """How far cells are apart: first by requests, as a ratio, then by length."""
    ratio = max(one[0], other[0]) / min(one[0], other[0])
    return ratio, abs(one[1] - other[1])
