"""A scheduler without a model, and a stand-in for the engine that executes its turns."""

from __future__ import annotations

import math
from collections.abc import Callable

from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import PrefixCache
from mtpc.engine.request import Request
from mtpc.engine.scheduler import Scheduler, Turn
from mtpc.layout import Bucket

PAGE, CHUNK, SPEC_TOKENS = 4, 8, 2
ROWS = 2


def pages_for(num_committed: int) -> int:
    return math.ceil((num_committed + 1 + 2 * SPEC_TOKENS) / PAGE)


def make(
    slots: int = 3, pages: int = 12, reuse: bool = True, rows: int = ROWS, busy: int = CHUNK
) -> Scheduler:
    pool = PagePool(1, pages)
    prefixes = PrefixCache(pool.index, PAGE, SPEC_TOKENS) if reuse else None
    places = FreeList(1, slots)
    prefill = Bucket(rows, CHUNK // rows)
    return Scheduler(places, pool, prefixes, pages_for, prefill, busy, SPEC_TOKENS + 1)


def request(number: int, length: int, new: int, kind: int = 0) -> Request:
    return Request(number, [kind * 100 + i for i in range(length)], new)


def play(scheduler: Scheduler, turn: Turn, emitted: Callable[[], int]) -> list[Request]:
    """Execute a turn as the engine does; returns the finished requests."""
    assert (turn.phase == "prefill") == bool(turn.prompts)
    assert all(one.is_prefilled for one in turn.decoding)
    if turn.phase == "prefill":
        taken = len(turn.decoding) * scheduler.joining_tokens
        assert 0 < sum(turn.chunks) <= CHUNK - taken
        assert len(turn.requests) <= scheduler.prefill.num_reqs
        for one, count in zip(turn.prompts, turn.chunks, strict=True):
            assert 0 < count <= one.num_input - one.num_prefilled
            one.num_prefilled += count
            scheduler.learn(one)
    for one in turn.decoding:
        assert len(one.pages) >= pages_for(one.num_committed), "a step without its pages"
    emits = [one for one in turn.requests if one.is_prefilled]
    counts = [min(emitted(), one.remaining_tokens) for one in turn.decoding]
    counts += [1] * (len(emits) - len(counts))
    finished = []
    for one, count in zip(emits, counts, strict=True):
        one.output_ids += [7000 + one.num_tokens + i for i in range(count)]
        scheduler.learn(one)
        if not one.remaining_tokens:
            scheduler.remove(one)
            finished.append(one)
    return finished
