"""What the cache lacks: why, what its nearest entry says of it, and how far its build is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from mtpc.errors import CacheError
from mtpc.layout import Graphs, Part, StepKey, step_name
from mtpc.layout.progress import Detail
from mtpc.program.step_cache import ANY, FIXED, OwnSteps, StepCache, read_record
from mtpc.store.key import Difference, Fields
from mtpc.store.lookup import peek
from mtpc.store.nearest import nearest

_SHOWN = 4
"""A one-line reason names at most this many differences."""
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

    def __init__(self, expected: Mapping[Any, Mapping[str, float]], workers: int = 1):
        known = dict[Any, list[float]]()
        for graph, stages in expected.items():  # From a file, which may hold anything.
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


def reasons(cache: StepCache, key: StepKey, part: Part = "step") -> list[Difference] | None:
    """Differences between a step's key and the nearest entry; None if the cache has no step.

    There are none if the step's own entry is there, but damaged.
    """
    entries = [*peek(cache.store)]
    rows = (nearest(entries, cache.fields(key, part, fixed)) for fixed in FIXED)
    found = [row.differences for row in rows if row is not None]
    # Where some are equally near, the one that says by which size the entry differs: `ANY` of
    # a step is another number than the entry's.
    return min(
        found, key=lambda rows: (len(rows), sum(r.wanted == ANY for r in rows)), default=None
    )


def miss(cache: StepCache, key: StepKey, part: Part = "step") -> str:
    """One line that says why a step is not in the cache."""
    found = reasons(cache, key, part)
    if found:
        shown = "; ".join(map(str, found[:_SHOWN]))
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        why = f"the nearest entry differs in {shown}{more}"
    else:
        why = "it holds no step" if found is None else "its entry is damaged"
    return Detail(f"{step_name(key, part)} is not in the cache {cache.store.root}: {why}")


def seconds_of_nearest(cache: OwnSteps, graphs: Graphs) -> Iterator[Mapping[str, float]]:
    """For each graph, the seconds of each stage of the nearest entry's build.

    They are {} if there is no such entry, or if the cache cannot be trusted. In that case the
    error comes when a step is taken from the cache.
    """
    if not isinstance(cache, StepCache):
        yield from ({} for _ in graphs)
        return
    entries, seconds = list[tuple[str, Fields]](), dict[str, Mapping[str, float]]()
    with suppress(CacheError):
        entries += peek(cache.store)
    for key, part in graphs:
        row = nearest(entries, cache.fields(key, part))
        if row is None:
            yield {}
            continue
        if row.digest not in seconds:
            seconds[row.digest] = {}
            with suppress(CacheError):
                entry = cache.store.read(row.digest)
                seconds[row.digest] = read_record(entry).seconds if entry else {}
        yield seconds[row.digest]
