"""Why the graph cache lacks a step, and what its nearest entry says of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from mtpc.errors import CacheError
from mtpc.layout import Graphs, Part, StepKey, step_name
from mtpc.layout.progress import Detail
from mtpc.program.step_cache import ANY, FIXED, OwnSteps, StepCache, read_record
from mtpc.store.key import Difference, Fields
from mtpc.store.lookup import peek
from mtpc.store.nearest import nearest

_SHOWN = 4
"""A one-line reason names at most this many differences."""


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
