"""How far a build is, by the seconds of earlier steps' records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STAGES = ("trace", "rewrite", "split", "lower")
"""The stages that a step's record has seconds of, in the order in which they run."""
_LONGEST_S = 1e6
"""A record with a longer stage is damaged, and does not count."""


class Forecast:
    """The share of a build that is done, and the time that is left.

    Args:
        expected: the seconds of each stage of each graph that is to be built, by any name. If a
            graph has none, nothing is known.
        workers: processes that build at the same time.
    """

    def __init__(self, expected: Mapping[Any, Mapping[str, float]] | None = None, workers: int = 1):
        known = dict[Any, list[float]]()
        for graph, stages in (expected or {}).items():  # From a file, which may hold anything.
            found = (stages.get(stage, 0.0) for stage in STAGES)
            known[graph] = [float(s) if 0 <= s < _LONGEST_S else 0.0 for s in found]
        self._left = known if all(sum(seconds) for seconds in known.values()) else {}
        self._total_s = sum(map(sum, self._left.values()))
        self._workers, self._start = workers, time.perf_counter()

    def begins(self, graph: Any, stage: str) -> None:
        """A stage of a graph begins, so the stages before it are over."""
        if graph in self._left and stage in STAGES:
            over = STAGES.index(stage)
            self._left[graph] = [0.0] * over + self._left[graph][over:]

    def finished(self, graph: Any) -> None:
        """A graph is built."""
        self._left.pop(graph, None)

    def now(self) -> tuple[float | None, float | None]:
        """The share that is done, and the seconds that are left; None for both if nothing is known.

        The time of the whole build is the elapsed time of the part that is done, and the expected
        time of the other part.
        """
        if not self._total_s:
            return None, None
        to_come = sum(map(sum, self._left.values())) / self._total_s
        elapsed_s = time.perf_counter() - self._start
        whole_s = elapsed_s + to_come * self._total_s / self._workers
        return 1 - to_come, to_come * whole_s


class StageTimer:
    """Seconds by stage, as a step's record has them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of the block."""
        start = time.perf_counter()
        yield
        seconds = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        self.seconds[stage] = round(seconds, 3)
