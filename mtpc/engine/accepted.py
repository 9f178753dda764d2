"""Estimates which drafts will be accepted, and so how many tokens a step will emit.

A request with K drafts emits 1 + the sum over i <= K of a_1 * ... * a_i tokens. Here a_i is the
share of accepted drafts at position i, among those whose earlier drafts were all accepted.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

LONG_MEMORY, LATE_MEMORY, OWN_MEMORY, SCORE_MEMORY = 0.998, 0.8, 0.97, 0.98
"""The weight that older samples keep at each new step: for all requests in the long run and lately,
for one request, and for the comparison of these."""
LONG_PRIOR, LATE_PRIOR, OWN_PRIOR = 1.0, 2.0, 4.0
"""How many samples the prior counts for. In the long run the prior is the share at the position
before; otherwise it is the share of all requests in the long run."""
USUAL = 0.7
"""The share of first drafts that is expected before any was verified."""
SURE = 2.0
"""Another estimate replaces the long run if the logarithm of its likelihood is larger by this."""
_LEAST = 1e-3
"""The least probability that is given to what happened."""


@dataclass
class Acceptance:
    """Counts of tried and accepted drafts at each position. The newest have the most weight.

    Attributes:
        memory: the weight that older samples keep at each new step.
        prior: how many samples the prior counts for.
        tried: number of samples, by position.
        accepted: number of accepted ones among them.
        worth: what a token of this request counts, beside those of the other requests.
    """

    memory: float = OWN_MEMORY
    prior: float = OWN_PRIOR
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    worth: float = 1.0

    def forget(self) -> None:
        """Begin a new step. All positions forget a little, so that old samples of many drafts
        fade."""
        self.tried = [self.memory * value for value in self.tried]
        self.accepted = [self.memory * value for value in self.accepted]

    def add(self, verified: int, accepted: int) -> None:
        """Record that drafts were verified and the first of them accepted."""
        self._grow(verified)
        for position in range(min(verified, accepted + 1)):
            self.tried[position] += 1
            self.accepted[position] += position < accepted

    def _grow(self, count: int) -> None:
        new = [0.0] * (count - len(self.tried))
        self.tried += new
        self.accepted += new

    def share(self, position: int, known: float) -> float:
        """The share of drafts at a position that are accepted.

        Args:
            position: draft position, from 0.
            known: the prior.
        """
        tried, accepted = self.prior, self.prior * known
        if position < len(self.tried):
            tried += self.tried[position]
            accepted += self.accepted[position]
        return accepted / tried


class Experience:
    """What all requests, and each of them, accepted.

    There are three estimates: of all requests in the long run, of all requests lately, and of each
    request by itself. The estimate that has best predicted recent first drafts is used. With every
    step, even one without drafts, the recent estimate fades into the long run.

    Args:
        count: the largest K.
    """

    def __init__(self, count: int):
        self.count = count
        self._long = Acceptance(LONG_MEMORY, LONG_PRIOR)
        self._late = Acceptance(LATE_MEMORY, LATE_PRIOR)
        self._own_is_better = self._late_is_better = 0.0  # Logarithms of ratios of likelihoods.

    def add(self, drafts: Iterable[tuple[int, int]], each: Iterable[Acceptance] = ()) -> None:
        """Record a step.

        Args:
            drafts: for each request, the number of verified drafts and the number of accepted ones.
            each: the counts of these requests; this adds to them.
        """
        known = self._long.share(0, USUAL)
        late = self._late.share(0, known)
        self._long.forget()
        self._late.forget()
        late_more, own_more, compared = 0.0, 0.0, False
        for (verified, accepted), own in zip_longest(drafts, each):
            if not verified:
                continue
            compared = True
            late_more += _more(late, known, accepted)
            if own is not None:
                own_more += _more(own.share(0, known), known, accepted)
                own.forget()
                own.add(verified, accepted)
            self._late.add(verified, accepted)
            self._long.add(verified, accepted)
        if compared:
            self._late_is_better = max(SCORE_MEMORY * self._late_is_better + late_more, -SURE)
            self._own_is_better = max(SCORE_MEMORY * self._own_is_better + own_more, -SURE)

    def shares(self) -> list[float]:
        """All requests' shares by position, in the long run.

        A position without a sample takes the share of the position before it, or `USUAL`.
        """
        found, known = list[float](), USUAL
        for position in range(self.count):
            known = self._long.share(position, known)
            found.append(known)
        return found

    def lengths(self, each: Sequence[Acceptance]) -> list[list[float]]:
        """The expected tokens of a request in steps with 0 drafts to the most.

        Args:
            each: the counts of the requests that run.

        Returns:
            One list for each request, or one for all.
        """
        guesses = [self.shares()]
        if max(self._own_is_better, self._late_is_better) > SURE:
            is_own = each and self._own_is_better > self._late_is_better
            guesses = [self._guess(one) for one in (each if is_own else (self._late,))]
        return [
            list(itertools.accumulate(itertools.accumulate(shares, operator.mul, initial=1.0)))
            for shares in guesses
        ]

    def _guess(self, one: Acceptance) -> list[float]:
        """Shares by position, with the long run as their prior."""
        found, ratio = list[float](), 1.0
        for position, known in enumerate(self.shares()):
            share = one.share(position, min(known * ratio, 1.0))
            ratio = share / max(known, _LEAST)
            found.append(share)
        return found


def _more(share: float, known: float, accepted: int) -> float:
    """How much better a share predicted whether the first draft was accepted."""
    hit, usual = (share, known) if accepted else (1 - share, 1 - known)
    return math.log(max(hit, _LEAST) / max(usual, _LEAST))
