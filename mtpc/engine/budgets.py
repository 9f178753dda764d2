"""Chooses K and the budget of rows of each decode step: the most expected tokens per second.

A step reports the chance of each draft that may come next. A step with K drafts and a budget of B
rows verifies the likeliest ones that fit, so the sum of their chances, and one token for each
request, is what such steps are expected to emit. Divided by their measured time that is a rate.
Times are those of a number of running requests, because kernels leave out idle rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

from mtpc.engine.estimates import StepCosts

REPEAT = 100
"""Steps of as many requests after which the one that was measured longest ago is measured again."""
ENOUGH = 2
"""Samples of a step before its time counts: the first may take too long."""
CHANGE = 0.2
"""Steps' time that waiting has lost when K changes; the first step with more drafts has none to
verify."""
Shape = tuple[int, int]
"""A decode step of a bucket: K, and its rows a request."""


class BudgetPolicy:
    """Chooses among `shapes`, decode steps of which those with most rows come last, from measured
    times and from chances."""

    def __init__(self, shapes: Sequence[Shape]):
        self._all, self._waited = tuple(shapes), 0.0
        self.use({k for k, _ in shapes})

    def use(self, tiers: Collection[int]) -> None:
        """Choose among the steps of these K from the next step on."""
        self.shapes = tuple(shape for shape in self._all if shape[0] in tiers)
        self.current, self._measured = self.shapes[-1], Counter[Shape]()
        self._costs = dict[int, StepCosts[Shape]]()  # By the number of running requests.

    def choose(self, num_reqs: int, chances: Sequence[Sequence[float]]) -> Shape:
        """The next decode step of a bucket, from the chances of each request's drafts: () of a
        request of which no step has told any."""
        new = [shape for shape in self.shapes if self._measured[shape] < ENOUGH]
        if new or not self._costs:
            return (new or self.shapes)[-1]
        costs = self._costs[self._nearest(len(chances))]
        if sum(costs.counts) % REPEAT == REPEAT - 1:
            return min(zip(costs.last, costs.tiers, strict=True))[1]
        rates = self._rates(costs, num_reqs, chances)
        best = max(rates, key=rates.__getitem__)
        alike = max((s for s in rates if s[0] == self.current[0]), key=rates.__getitem__)
        self._waited = self._waited + 1 - rates[alike] / rates[best] if alike != best else 0.0
        self.current = best if self._waited >= CHANGE else alike
        return self.current

    def _rates(
        self, costs: StepCosts[Shape], num_reqs: int, chances: Sequence[Sequence[float]]
    ) -> dict[Shape, float]:
        gains = {
            k: [0.0, *accumulate(sorted((c for row in chances for c in row[:k]), reverse=True))]
            for k in {k for k, _ in self.shapes}
        }
        rates = {}
        for k, rows in self.shapes:
            room = max(rows * num_reqs - len(chances), 0)
            tokens = len(chances) + gains[k][min(room, len(gains[k]) - 1)]
            rates[k, rows] = tokens / costs.seconds((k, rows))
        return rates

    def observe(self, running: int, shape: Shape, seconds: float, context: int) -> None:
        """Record a decode step of so many requests, with the tokens of all of them."""
        if running not in self._costs:
            # A draft is some half of a row's work.
            work = {(k, rows): rows - 1 + k / 2 for k, rows in self.shapes}
            like = self._costs[self._nearest(running)] if self._costs else None
            self._costs[running] = StepCosts(work, like=like)
        costs = self._costs[running]
        costs.add(shape, seconds, sum(costs.counts) + 1, context)
        self._measured[shape] += 1

    def _nearest(self, running: int) -> int:
        """The number of requests nearest to this one of which times are known."""
        return min(self._costs, key=lambda known: abs(known - running))
