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

    Attributes:
        current: the budget of the last step.
    """

    def __init__(self, budgets: Sequence[int]):
        self.budgets, self.current = tuple(budgets), budgets[-1]
        self._costs = dict[int, StepCosts]()
        self._steps = dict[int, int]()

    def choose(self, num_reqs: int, chances: Sequence[Sequence[float]]) -> int:
        """The budget of the next decode step.

        Args:
            num_reqs: of the bucket.
            chances: of each request's drafts; () of a request of which no step has told any.
        """
        if len(self.budgets) == 1:
            return self.current
        costs = self._costs.get(num_reqs)
        new = [b for b in self.budgets if costs is None or self._count(costs, b) < ENOUGH]
        if new or costs is None:
            self.current = new[-1]
        elif self._steps[num_reqs] % REPEAT == 0:
            self.current = min(self.budgets, key=lambda b: costs.last[costs.tiers.index(b)])
        else:
            gains = [0.0, *accumulate(sorted((c for row in chances for c in row), reverse=True))]
            rates = {
                budget: (len(chances) + gains[min(room, len(gains) - 1)]) / costs.seconds(budget)
                for budget in self.budgets
                if (room := max(budget * num_reqs - len(chances), 0)) >= 0
            }
            self.current = max(rates, key=rates.__getitem__)
        return self.current

    def observe(self, num_reqs: int, budget: int, seconds: float, context: int) -> None:
        """Record a decode step: of a bucket's rows, with the tokens of all its requests."""
        step = self._steps[num_reqs] = self._steps.get(num_reqs, 0) + 1
        costs = self._costs.setdefault(num_reqs, StepCosts(self.budgets))
        costs.add(budget, seconds, step, context)

    @staticmethod
    def _count(costs: StepCosts, budget: int) -> int:
        return costs.counts[costs.tiers.index(budget)]
