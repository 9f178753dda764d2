"""Which drafts were accepted lately, of all requests and of each, and the tokens to expect.

A request with K drafts emits 1 + the sum over i <= K of a_1 * ... * a_i tokens. Here a_i is the
share of drafts at position i that are accepted, given that all drafts before them are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

LONG_MEMORY, LATE_MEMORY, OWN_MEMORY, SCORE_MEMORY = 0.998, 0.8, 0.97, 0.98
"""Weight of what was before at each new step: of all requests in the long run and lately, of one
request, and of the comparison of these."""
LONG_PRIOR, LATE_PRIOR, OWN_PRIOR = 1.0, 2.0, 4.0
"""Samples that count for what is known before: in the long run the position before, else what all
requests accept in the long run."""
SURE = 2.0
"""Another guess counts where its logarithm of the likelihood is larger by this much."""
_LEAST = 1e-3
"""The least probability that something which happened is given."""


@dataclass
class Acceptance:
    """Drafts that were tried and accepted at each position, the last ones with the most weight.

    Attributes:
        memory: weight of the older samples at each new step.
        prior: the number of samples that what is known before counts for.
        tried: number of samples, by position.
        accepted: of them the accepted ones.
    """

    memory: float = OWN_MEMORY
    prior: float = OWN_PRIOR
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def forget(self) -> None:
        """Begin a new step. All positions forget, so that what was learnt long ago of many drafts
        fades."""
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
            known: what is known before any sample.
        """
        tried, accepted = self.prior, self.prior * known
        if position < len(self.tried):
            tried += self.tried[position]
            accepted += self.accepted[position]
        return accepted / tried


class Experience:
    """What all requests and each of them accepted.

    Three guesses are kept: of all requests in the long run, of all lately, and of each request by
    itself. The one counts that has predicted the last first drafts best. What was accepted lately
    fades into the long run with every step, drafts or none.

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
            drafts: of each request the number of drafts verified, and of them accepted.
            each: of these requests; this adds to it.
        """
        known = self._long.share(0, 0.5)
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

        A position without a sample takes the share of the position before it, or 0.5.
        """
        found, known = list[float](), 0.5
        for position in range(self.count):
            known = self._long.share(position, known)
            found.append(known)
        return found

    def lengths(self, each: Sequence[Acceptance]) -> list[float]:
        """The expected tokens per request of steps with 0 drafts to the most.

        Args:
            each: of the requests that run.
        """
        tokens = [1.0] + [0.0] * self.count
        guesses = [self.shares()]
        if max(self._own_is_better, self._late_is_better) > SURE:
            is_own = each and self._own_is_better > self._late_is_better
            guesses = [self._guess(one) for one in (each if is_own else (self._late,))]
        for shares in guesses:
            reached = 1.0 / len(guesses)
            for position, share in enumerate(shares):
                reached *= share
                tokens[position + 1] += reached
        return list(itertools.accumulate(tokens))

    def _guess(self, one: Acceptance) -> list[float]:
        """Shares by position, of samples that know the long run."""
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
