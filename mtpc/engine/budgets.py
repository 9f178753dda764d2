"""Chooses the budget of rows of each decode step: the most expected tokens per second.

A step reports the chance of each draft that it proposed. A budget of B rows verifies the likeliest
ones that fit, so the sum of their chances, and one token for each request, is what the next step is
expected to emit. Divided by the measured time of such steps that is a rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mtpc.engine.estimates import StepCosts

REPEAT = 250
"""Steps of a bucket after which the budget that was measured longest ago is measured again."""
ENOUGH = 2
"""Steps that measure a budget before its time counts: the first may take too long."""


class BudgetPolicy:
    """Chooses among budgets from measured times and from chances.

    Args:
        budgets: rows a request, ascending.
    """

    def __init__(self, budgets: Sequence[int]):
        self.budgets, self._costs = tuple(budgets), dict[int, StepCosts]()

    def choose(self, num_reqs: int, chances: Sequence[Sequence[float]]) -> int:
        """The budget of the next decode step.

        Args:
            num_reqs: of the bucket.
            chances: of each request's drafts; () of a request of which no step has told any.
        """
        costs = self._costs.get(num_reqs)
        if len(self.budgets) == 1 or costs is None:
            return self.budgets[-1]
        new = [b for b, count in zip(costs.tiers, costs.counts, strict=True) if count < ENOUGH]
        if new:
            return new[-1]
        if sum(costs.counts) % REPEAT == 0:
            return min(zip(costs.last, costs.tiers, strict=True))[1]
        gains = [0.0, *accumulate(sorted((c for row in chances for c in row), reverse=True))]

        def rate(budget: int) -> float:
            room = max(budget * num_reqs - len(chances), 0)
            return (len(chances) + gains[min(room, len(gains) - 1)]) / costs.seconds(budget)

        return max(self.budgets, key=rate)

    def observe(self, num_reqs: int, budget: int, seconds: float, context: int) -> None:
        """Record a decode step: of a bucket's rows, with the tokens of all its requests."""
        costs = self._costs.setdefault(num_reqs, StepCosts(self.budgets))
        costs.add(budget, seconds, sum(costs.counts) + 1, context)
