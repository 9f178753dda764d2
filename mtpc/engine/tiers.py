"""Chooses K, the number of drafts of the next decode step, for a program with several K.

A step with K drafts takes T(K) seconds and emits L(K) tokens per request: one, and the accepted
drafts. The best K has the largest L(K) / T(K). More drafts pay off with few requests, when reading
the weights dominates the cost of a step. They do not when the processor is the limit, or when the
text is hard to predict. The engine measures T and L as it runs. A prefill step always has the
largest K, also for the decoding requests that share it.

L is the mean over the running requests. If they differ, each has an L of its own, and its tokens
have a worth: the part of a step that one of them usually takes. With equal worths the policy would
draft too often: requests whose drafts are accepted would end soon, for the price of slow steps of
those that accept nothing, which remain.

Costs are kept per *cell*: a bucket, and the magnitude of the requests' lengths. The graph cache
keeps them for later runs. Costs change, and so do texts, so the policy tries every K again and
again. Two accounts, both in seconds, bound what these trials cost:

- What trials lose, for each K of a cell. It stays below a small share of all time. If a cost is new
  or has suddenly changed, a trial may lose the time of one step in advance.
- What the policy loses to the smallest K (0, plain decoding): the time beyond what the same tokens
  take there. If it exceeds a small share of the recent time, the policy rests at the smallest K.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import exp
from operator import mul

from mtpc.engine.estimates import SPIKE, Acceptance, CellCosts, Experience, StepCosts

BUDGET = 0.006
"""The share of decode time that the trials of all K together may lose."""
CREDIT = 1.0
"""The steps whose time a trial may lose in advance if a cost is new or has suddenly changed, or for
the step that verifies the trial's drafts."""
FLOOR, RESTED, SLACK = 0.03, 0.015, 2.0
"""Shares of recent time lost to the smallest K at which the policy begins to rest there, and ends;
and so many steps more may be lost, because acceptance varies."""
# The weight that older steps keep: in that account, and in the shares of steps that each K has.
RECENT, USUAL = 0.999, 0.99
CLASS_TOKENS = 512  # Of the first class of lengths; each after it ends at twice as many.
MOST_S = 1e4  # A record with a longer step is damaged.
Place = tuple[int, int]
"""The place of a cell: rows of a bucket, and the class of the requests' mean length."""
Costs = Mapping[Place, CellCosts]


class TierPolicy:
    """Chooses K for each decode step from measured costs (`known`: of earlier runs) and acceptance.

    Attributes:
        current: the K that the policy prefers, which changed `switches` times.
        steps: number of decode steps with a choice.
        spent: seconds in decode steps. Trials lost `lost` of these to the preferred K.
        rests: whether the smallest K has been better lately than what the policy did.
    """

    def __init__(self, tiers: Sequence[int], known: Costs | None = None):
        self._known, self._cells = dict(known or {}), dict[Place, StepCosts[int]]()
        self.switches = self.steps = 0
        self.spent = self.lost = 0.0
        self.rests = False
        self.experience = Experience(max(tiers))
        self._tokens, self._verified = 1.0, False
        self._waited = self._behind = self._recent = 0.0
        self._left, self._wins, self.current, self._idle = 0, False, min(tiers), False
        self.use(tiers)

    def use(self, tiers: Sequence[int]) -> None:
        """Choose among these K from the next step on. What is known of acceptance is kept."""
        self._known = self.costs()
        self.tiers = tuple(sorted(set(tiers)))
        self._cells = {
            place: StepCosts({k: k for k in self.tiers}, found=found)
            for place, found in self._known.items()
            if tuple(sorted(found)) == self.tiers
        }
        self.experience.count = self.tiers[-1]
        self._shares = dict.fromkeys(self.tiers, 1 / len(self.tiers))
        self._weigh(())
        self._trial: int | None = None
        if self.current not in self.tiers:
            self.current = self.tiers[0]

    def costs(self) -> dict[Place, CellCosts]:
        """What this run and earlier ones know of costs, for later runs."""
        own = {place: cell.known for place, cell in self._cells.items()}
        return {**self._known, **own}

    def choose(
        self, num_reqs: int, context: int = 0, each: Sequence[Acceptance] = (), idle: bool = False
    ) -> int:
        """K of the next decode step: of a bucket's rows, the tokens of all its requests, and the
        counts of what each accepted. `idle` says that no request has a draft to verify, and that a
        step of any K proposes the most."""
        if len(self.tiers) == 1:
            return self.current
        self._idle = idle
        if idle:
            return self.tiers[0]
        place = _place(num_reqs, context)
        cell, near = self._cells.get(place), self._nearest(place)
        self._weigh(each)
        if near is None:
            return self.current
        near.age(self.steps)
        self._prefer(near)
        self._trial = None if self.rests or cell is None else self._next_trial(cell)
        if self.rests:
            return self.tiers[0]
        return self.current if self._trial is None else self._trial

    def _weigh(self, each: Sequence[Acceptance]) -> None:
        """Set what the requests' tokens are worth, 1 on average, and the expected tokens by K."""
        lengths = self.experience.lengths(each)
        steps = [1 / sum(s * own[k] for k, s in self._shares.items()) for own in lengths]
        worths = [value * len(steps) / sum(steps) for value in steps]
        columns = zip(*lengths, strict=True)
        self._lengths = [sum(map(mul, worths, column)) / len(worths) for column in columns]
        for own, worth in zip(each, cycle(worths), strict=False):
            own.worth = worth

    def _prefer(self, cell: StepCosts[int]) -> None:
        """Change the preferred K once waiting has lost as much time as a change there and back.

        The first step verifies drafts of a prefill step, which has the most: any K begins at once.
        """
        best = max(self.tiers, key=lambda tier: self._rate(cell, tier))
        if best != self.current and self.steps:
            share = self._rate(cell, self.current) / self._rate(cell, best)
            self._waited += cell.seconds(self.current) * (1 - share)
            if self._waited < self._change_cost(cell, best):
                return
            self.switches += 1
        self.current, self._waited = best, 0.0

    def _next_trial(self, cell: StepCosts[int]) -> int | None:
        """Another K than the preferred one to try now, or None.

        With more drafts than the preferred K, a trial has two steps: the first one verifies only
        the drafts of the step before.
        """
        tier, step_s = self._trial, cell.seconds(self.current)
        if tier is not None and tier != self.current:
            # The last step shows what is accepted. A surprise gets a second sample, and a K that
            # wins goes on.
            is_open = self._wins or cell.surprises[tier] != 0
            if is_open or (self._left and self._loss(cell, tier) <= CREDIT * step_s):
                self._left = max(self._left - 1, 0)
                return tier
        if not cell.is_known(self.current):
            return None
        left = {
            tier: cell.allowed[tier]
            + (cell.last[self.tiers.index(tier)] < cell.changed) * CREDIT * step_s
            - (1 + (tier > self.current)) * self._loss(cell, tier)
            - self._change_cost(cell, tier)
            for tier in self.tiers
            if tier != self.current
        }
        tier = max(left, key=left.__getitem__)
        if left[tier] < 0:
            return None
        if tier < self.current:
            cell.allowed[tier] -= self._change_cost(cell, tier)
            self.lost += self._change_cost(cell, tier)
        self._left, self._wins = int(tier > self.current), False
        return tier

    def _loss(self, cell: StepCosts[int], tier: int) -> float:
        """The seconds that a step is expected to lose, if its K is better than it seems."""
        return cell.seconds(tier) * (1 - self._hope(cell, tier))

    def _hope(self, cell: StepCosts[int], tier: int) -> float:
        """A K's rate over the preferred one's, at most 1, if its cost is a standard error lower."""
        ratio = self._rate(cell, tier) / self._rate(cell, self.current)
        return min(ratio * exp(cell.doubt(tier, self.current)), 1.0)

    def _change_cost(self, cell: StepCosts[int], tier: int) -> float:
        """The seconds lost by going from the preferred K to another and back.

        The first step of the larger K verifies no more drafts than the smaller one proposes.
        """
        low, high = sorted((tier, self.current))
        return cell.seconds(high) * (1 - self._lengths[low] / self._lengths[high])

    def observe(self, num_reqs: int, tier: int, seconds: float, context: int = 0) -> None:
        """Record the seconds of a decode step, after its drafts: of its bucket's rows, its K, and
        the tokens of all its requests."""
        self.spent += seconds
        if len(self.tiers) == 1:
            return
        place = _place(num_reqs, context)
        if place not in self._cells:
            work = {k: k for k in self.tiers}
            self._cells[place] = StepCosts(work, self.steps, self._nearest(place))
        cell = self._cells[place]
        cell.add(tier, seconds, self.steps, context)
        # What another process took of one step says nothing of drafts.
        seconds = min(seconds, cell.seconds(tier) * exp(SPIKE))
        self.steps += 1
        share = BUDGET / (len(self.tiers) - 1) * seconds
        for k in self.tiers:
            self._shares[k] += (1 - USUAL) * ((k == tier) - self._shares[k])
            if k != tier:  # A hopeless K gets little.
                cell.allowed[k] += share * self._hope(cell, k)
        if tier != self.current and not (self.rests or self._idle):
            lost = seconds - self._tokens / self._rate(cell, self.current)
            self._wins = self._verified and lost < 0
            cell.allowed[tier] -= lost
            self.lost += lost
        self._compare(cell, tier, seconds)

    def _compare(self, cell: StepCosts[int], tier: int, seconds: float) -> None:
        """Count what a step lost to the smallest K."""
        plain = self._rate(cell, self.tiers[0])
        lost = seconds - self._tokens / plain if tier > self.tiers[0] else 0.0
        self._behind = max(RECENT * self._behind + lost, 0.0)
        self._recent = RECENT * self._recent + seconds
        limit = RESTED * self._recent if self.rests else FLOOR * self._recent + SLACK / plain
        self.rests = self._behind > limit

    def observe_drafts(
        self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()
    ) -> None:
        """Record which drafts a decode or prefill step accepted: for each decoding request, the
        drafts verified (fewer than K after a step that proposed fewer) and those accepted. This
        adds to the counts of these requests so far."""
        if len(self.tiers) == 1:
            return
        drafts, each = list(drafts), list(each)
        self._verified = any(verified for verified, _ in drafts)
        worths = [own.worth for own in each] or [1.0] * len(drafts)
        accepted = sum(worth * right for worth, (_, right) in zip(worths, drafts, strict=True))
        self._tokens = 1 + accepted / (sum(worths) or 1.0)
        self.experience.add(drafts, each)

    def _rate(self, cell: StepCosts[int], tier: int) -> float:
        return self._lengths[tier] / cell.seconds(tier)

    def _nearest(self, place: Place) -> StepCosts[int] | None:
        """The cell of a place, or else the nearest, by requests as a ratio, and then by length."""

        def distance(other: Place) -> tuple[float, int]:
            ratio = max(place[0], other[0]) / min(place[0], other[0])
            return ratio, abs(place[1] - other[1])

        return self._cells[min(self._cells, key=distance)] if self._cells else None


def _place(num_reqs: int, context: int) -> Place:
    return num_reqs, (context // max(num_reqs, 1) // CLASS_TOKENS).bit_length()


def to_json(costs: Costs) -> bytes:
    rows = [[*place, [[k, *known] for k, known in cell.items()]] for place, cell in costs.items()]
    return json.dumps(rows).encode()


def from_json(data: bytes) -> Costs:
    """The reverse of `to_json`.

    Raises:
        ValueError: the text is anything else.
    """
    try:
        costs = {
            (int(num_reqs), int(length)): {int(k): (float(s), bool(known)) for k, s, known in cell}
            for num_reqs, length, cell in json.loads(data)
        }
        if not all(0 < s < MOST_S for cell in costs.values() for s, _ in cell.values()):
            raise ValueError("a time is out of range")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no costs of steps: {error}") from None
    return costs
