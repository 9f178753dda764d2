"""Which drafts were accepted lately, of all requests and of each, and the tokens to expect.

A request with K drafts emits 1 + the sum over i <= K of a_1 * ... * a_i tokens. Here a_i is the
share of drafts at position i that are accepted, given that all drafts before them are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ALL_MEMORY, OWN_MEMORY, SCORE_MEMORY = 0.993, 0.97, 0.98
"""Weight of the older samples at each new one: of all requests together, of one request, and of
the comparison of both."""
ALL_PRIOR, OWN_PRIOR = 1.0, 4.0
"""Samples that count for what is known before: of all requests the position before, of one request
the share of all requests."""
SURE = 1.0
"""A request's own share counts where its logarithm of the likelihood is larger by this much."""
_LEAST = 1e-3
"""The least probability that something which happened is given."""


@dataclass
class Acceptance:
    """Drafts that were tried and accepted at each position, the last ones with the most weight.

    Attributes:
        memory: weight of the older samples at each new one.
        prior: the number of samples that what is known before counts for.
        tried: number of samples, by position.
        accepted: of them the accepted ones.
    """

    memory: float = OWN_MEMORY
    prior: float = OWN_PRIOR
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, verified: int, accepted: int) -> None:
        """Record a step that verified drafts and accepted the first of them.

        All positions forget, so that what was learnt long ago of many drafts fades.
        """
        new = [0.0] * (verified - len(self.tried))
        self.tried += new
        self.accepted += new
        for position in range(len(self.tried)):
            was_tried = position < min(verified, accepted + 1)
            is_right = position < min(verified, accepted)
            self.tried[position] = self.memory * self.tried[position] + was_tried
            self.accepted[position] = self.memory * self.accepted[position] + is_right

    def share(self, position: int, known: float) -> tuple[float, float]:
        """The share of drafts at a position that are accepted, and at most its standard error.

        Args:
            position: draft position, from 0.
            known: what is known before any sample.
        """
        tried, accepted = self.prior, self.prior * known
        if position < len(self.tried):
            tried += self.tried[position]
            accepted += self.accepted[position]
        return accepted / tried, 0.5 / tried**0.5


class Experience:
    """What all requests and each of them accepted.

    A request's own share counts where requests differ, and everyone's where they are alike: what
    has predicted the first draft better lately.

    Args:
        count: the largest K.
    """

    def __init__(self, count: int):
        self._everyone, self.count = Acceptance(ALL_MEMORY, ALL_PRIOR), count
        self._own_is_better = 0.0  # Logarithm of the ratio of likelihoods.

    def add(self, verified: int, accepted: int, own: Acceptance | None = None) -> None:
        """Record a step of one request.

        Args:
            verified: drafts verified, at least one.
            accepted: drafts accepted.
            own: of this request; this adds to it.
        """
        if own is not None:
            known = self._everyone.share(0, 0.5)[0]
            shares = (own.share(0, known)[0], known)
            hits = [max(share if accepted else 1 - share, _LEAST) for share in shares]
            self._own_is_better *= SCORE_MEMORY
            self._own_is_better += math.log(hits[0] / hits[1])
            own.add(verified, accepted)
        self._everyone.add(verified, accepted)

    def shares(self) -> list[tuple[float, float]]:
        """All requests' shares by position, each with its error.

        A position without a sample takes the share of the position before it, or 0.5.
        """
        found, known = list[tuple[float, float]](), 0.5
        for position in range(self.count):
            found.append(self._everyone.share(position, known))
            known = found[-1][0]
        return found

    def lengths(self, each: Sequence[Acceptance], doubt: float = 0.0) -> list[float]:
        """The expected tokens per request of steps with 0 drafts to the most.

        Args:
            each: of the requests that run.
            doubt: standard errors that are added to each share.
        """
        shares, tokens = self.shares(), [1.0] + [0.0] * self.count
        owners = each if self._own_is_better > SURE and each else (None,)
        for own in owners:
            reached = 1.0 / len(owners)
            for position, (share, error) in enumerate(shares):
                if own is not None:
                    share, error = own.share(position, share)
                reached *= min(share + doubt * error, 1.0)
                tokens[position + 1] += reached
        return list(itertools.accumulate(tokens))
