"""The scheduler without a model: turns, order of admission, chunks, and that all of it ends."""

from __future__ import annotations

import math
import random

import pytest
from helpers.turns import CHUNK, PAGE, SPEC_TOKENS, make, pages_for, play, request
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import PrefixCache
from mtpc.engine.request import Request
from mtpc.engine.scheduler import Scheduler, Turn
from mtpc.layout import Bucket

arrivals = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 25)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(arrivals, st.integers(10, 24), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_bounds(
    drawn: list[tuple[int, int, int, int]], pages: int, slots: int, reuse: bool, seed: int
) -> None:
    """Each step, or each other one, has a chunk, and all that decode; order is kept, the oldest is
    never sent back, and everything ends."""
    scheduler = make(slots, pages, reuse, 2 ** (seed % 4), busy=1 + seed % CHUNK)
    chance = random.Random(seed)
    coming = sorted(drawn, key=lambda one: one[3])
    added: list[Request] = []
    done: set[int] = set()
    phases: list[set[str]] = []
    preempted = 0
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][3] <= len(phases):
            length, new, kind, _ = coming.pop(0)
            added.append(request(len(added), length, new, kind))
            scheduler.add(added[-1])
        before = list(scheduler.running)
        could_decode = any(r.is_prefilled for r in before)
        could_prefill = any(not r.is_prefilled for r in before)
        turn = scheduler.next_turn()
        if turn is None:
            assert not scheduler.running
            assert not scheduler.waiting
            phases.append(set())
            continue
        phases.append(
            {kind for kind, some in (("decode", turn.decoding), ("chunk", turn.prompts)) if some}
        )
        if turn.decoding:
            assert turn.decoding == [r for r in scheduler.running if r.is_prefilled], "all of them"
        if could_decode:
            assert "decode" in phases[-1] | phases[-2], "at most a chunk between two of its steps"
        still_prefills = any(not r.is_prefilled for r in scheduler.running)
        if could_prefill and still_prefills:
            assert "chunk" in phases[-1] | phases[-2], "every other step has one at least"
        running, waiting = scheduler.running, list(scheduler.waiting)
        numbers = [r.request_id for r in [*running, *waiting]]
        assert numbers == sorted(numbers), "nobody overtakes"
        if before:
            assert before[0] in running, "the oldest is never sent back"
        preempted += sum(r not in running for r in before)
        assert all(r.slot is not None for r in turn.placed)
        done |= {r.request_id for r in play(scheduler, turn, lambda: chance.randint(1, 3))}
        assert len(phases) < 3000, "livelock"
    assert done == set(range(len(added)))
    assert [len(r.output_ids) for r in added] == [r.max_new_tokens for r in added]
    assert scheduler.num_preemptions == preempted
    assert scheduler.pages.num_free == pages
    assert not any(scheduler.pages.users(page) for page in range(pages + 2))
    assert scheduler.slots.num_free == slots


class LateReader:
    """What the engine does with turns, one step late; it alone knows what was emitted unread."""

    def __init__(self, scheduler: Scheduler, chance: random.Random):
        self.scheduler, self.chance = scheduler, chance
        self.texts: dict[Request, int] = {}
        self.unread: list[tuple[Request, int, int]] | None = None

    def launch(self, turn: Turn) -> list[tuple[Request, int, int]]:
        """Emitting requests, tokens of each, and what the host takes for the most."""
        for one, count in zip(turn.prompts, turn.chunks, strict=True):
            one.num_prefilled += count
        # K may change from step to step.
        width = SPEC_TOKENS + 1 if turn.prompts else self.chance.choice((1, SPEC_TOKENS + 1))
        assert not any(one.is_surely_done for one in turn.decoding)
        assert not any(one.grammar and one.num_unread for one in turn.decoding)
        emitted = []
        for one in (one for one in turn.requests if one.is_prefilled):
            length = self.texts.setdefault(one, 0)
            most = width if one in turn.decoding else 1
            if one in turn.decoding and length < one.max_new_tokens:
                committed = len(one.prompt_ids) + length - 1
                assert len(one.pages) >= pages_for(committed), "a step without its pages"
            count = min(self.chance.randint(1, most), one.max_new_tokens - length)
            self.texts[one] = length + count
            one.num_unread += most
            emitted.append((one, count, most))
        return emitted

    def read(self, emitted: list[tuple[Request, int, int]]) -> None:
        for one, count, most in emitted:
            one.num_unread -= most
            if one.finish_reason is not None:
                assert count == 0, "idle behind its last token"
                continue
            one.output_ids += [7000 + one.num_tokens + i for i in range(count)]
            self.scheduler.learn(one)
            if not one.remaining_tokens:
                one.finish_reason = "length"
                self.scheduler.remove(one)

    def step(self) -> bool:
        """Launch the next turn, then read the one before; whether there was anything to do."""
        turn, before = self.scheduler.next_turn(), self.unread
        self.unread = self.launch(turn) if turn is not None else None
        self.read(before or [])
        return turn is not None or before is not None


@settings(max_examples=300, deadline=None)
@given(arrivals, st.integers(10, 24), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_bounds_one_step_late(
    drawn: list[tuple[int, int, int, int]], pages: int, slots: int, reuse: bool, seed: int
) -> None:
    """Pages suffice for whatever was emitted unread, nobody unread is sent back, all end."""
    scheduler = make(slots, pages, reuse, 2 ** (seed % 4), busy=1 + seed % CHUNK)
    chance = random.Random(seed)
    reader, steps, added = LateReader(scheduler, chance), 0, list[Request]()
    coming = sorted(drawn, key=lambda one: one[3])
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][3] <= steps:
            length, new, kind, _ = coming.pop(0)
            added.append(request(len(added), length, new, kind))
            added[-1].grammar = object() if chance.random() < 0.2 else None  # type: ignore[assignment]
            scheduler.add(added[-1])
        unread = [one for one in scheduler.running if one.num_unread]
        assert reader.step() or coming, "work, and nothing done"
        assert all(one in scheduler.running or one.finish_reason for one in unread)
        numbers = [one.request_id for one in [*scheduler.running, *scheduler.waiting]]
        assert numbers == sorted(numbers), "nobody overtakes"
        steps += 1
        assert steps < 3000, "livelock"
    assert [len(one.output_ids) for one in added] == [one.max_new_tokens for one in added]
    reader.read(reader.unread or [])  # Of the rest nothing was left to emit.
    assert not any(one.num_unread for one in added)
    assert scheduler.pages.num_free == pages
    assert scheduler.slots.num_free == slots


@pytest.mark.parametrize(("rows", "busy", "most"), [(1, 8, 2), (2, 8, 2), (4, 5, 1)])
def test_first_token_bound(rows: int, busy: int, most: int) -> None:
    """A prompt with c chunks before its first token has it after at most 2c steps; after c where
    whole chunks have room beside who decodes."""
    scheduler = make(slots=4, pages=60, rows=rows, busy=busy)
    new = 4 if most == 2 else 1  # A third one that decodes would leave no room for whole chunks.
    old, one, two = request(0, 3, 40), request(1, 20, new), request(2, 24, 4, kind=1)
    scheduler.add(old)
    play(scheduler, scheduler.next_turn(), lambda: 1)
    scheduler.add(one)
    scheduler.add(two)
    steps, firsts = 0, {}
    while len(firsts) < 2:
        play(scheduler, scheduler.next_turn(), lambda: 1)
        steps += 1
        for r in (one, two):
            if r.output_ids:
                firsts.setdefault(r.request_id, steps)
    chunks = [math.ceil(20 / busy), math.ceil(24 / busy)]
    assert firsts[1] <= most * chunks[0]
    assert firsts[2] <= most * sum(chunks)
    assert len(old.output_ids) >= 6, "and nobody's decoding stood still meanwhile"


def test_half_a_chunk_is_worth_a_step_of_its_own() -> None:
    """Beside two that decode there is room for two tokens: all that is left, or nobody joins."""
    scheduler = make(slots=4, pages=60, rows=4, busy=8)
    for number in range(2):
        scheduler.add(request(number, 1, 30, kind=number))
    seen = []
    for coming in ([], [], [(2, 2)], [(3, 6), (4, 7)], [], []):
        for number, length in coming:
            scheduler.add(request(number, length, 1, kind=number))
        turn = scheduler.next_turn()
        seen.append((len(turn.decoding), sum(turn.chunks)))
        play(scheduler, turn, lambda: 1)
    assert seen == [(0, 2), (2, 0), (2, 2), (2, 0), (0, 8), (2, 0)]


def test_a_chunk_is_filled_in_order_of_arrival() -> None:
    """The tail of one prompt and the heads of the next ones, as many as there are rows."""
    scheduler = make(slots=5, pages=60, rows=4)
    for number, length in enumerate((11, 2, 9, 1, 1)):
        scheduler.add(request(number, length, 4, kind=number))
    seen = []
    while any(not r.is_prefilled for r in scheduler.running) or scheduler.waiting:
        turn = scheduler.next_turn()
        if turn.phase == "prefill":
            seen.append([(r.request_id, n) for r, n in zip(turn.prompts, turn.chunks, strict=True)])
        play(scheduler, turn, lambda: 1)
    assert seen == [[(0, 8)], [(0, 3), (1, 2), (2, 3)], [(2, 6), (3, 1), (4, 1)]]
    scheduler = make(slots=5, pages=60, rows=2)
    for number in range(4):
        scheduler.add(request(number, 2, 4, kind=number))
    assert [r.request_id for r in scheduler.next_turn().requests] == [0, 1]


def test_chunks_are_smaller_while_others_decode() -> None:
    """Beside who decodes there is the busy chunk only; a prompt alone has the whole step."""
    scheduler = make(slots=3, pages=60, rows=4, busy=3)
    scheduler.add(request(0, 11, 6))
    seen = []
    while scheduler.running or scheduler.waiting:
        turn = scheduler.next_turn()
        if turn.phase == "prefill":
            seen.append(turn.chunks)
            if len(seen) == 2:
                scheduler.add(request(1, 7, 1, kind=1))
                scheduler.add(request(2, 2, 1, kind=2))
        play(scheduler, turn, lambda: 1)
    assert seen == [[8], [3], [3], [3], [1, 2]]


def test_the_youngest_goes_back_to_the_front() -> None:
    """A pool that runs dry: the last to come gives way, and is the next to be admitted."""
    scheduler = make(slots=2, pages=8, reuse=False)
    old, young, later = request(0, 8, 16), request(1, 4, 8, kind=1), request(2, 2, 2, kind=2)
    for one in (old, young, later):
        scheduler.add(one)
    while not scheduler.num_preemptions:
        play(scheduler, scheduler.next_turn(), lambda: 3)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, later]
    assert young.num_input == young.num_tokens > 4
    assert not young.pages
    while scheduler.running or scheduler.waiting:
        play(scheduler, scheduler.next_turn(), lambda: 3)
    assert [len(r.output_ids) for r in (old, young, later)] == [16, 8, 2]


def test_chunks_end_at_snapshots() -> None:
    """At every distance, and at the last page end some tokens before the prompt's end."""
    pool = PagePool(1, 60, num_snapshots=9)
    prefixes = PrefixCache(pool.index, PAGE, SPEC_TOKENS, distance=10)
    slots = FreeList(1, 3)
    scheduler = Scheduler(slots, pool, prefixes, pages_for, Bucket(2, 4), CHUNK, SPEC_TOKENS + 1)
    scheduler.add(request(0, 43, 4))
    ends = [0]
    while not ends[1:] or ends[-1] < 43:
        turn = scheduler.next_turn()
        play(scheduler, turn, lambda: 1)
        ends.append(ends[-1] + turn.chunks[0])
    # 10 tokens are three pages of 4. The last page end with 2 + 8 tokens behind it is 32.
    assert ends == [0, 8, 12, 20, 24, 32, 40, 43]


def test_a_request_waits_for_the_beginning_that_another_computes() -> None:
    """It shares what the other one has computed, and then goes on by itself."""
    scheduler = make(slots=3, pages=60)
    one, two, other = request(0, 20, 4), request(1, 24, 4), request(2, 6, 4, kind=1)
    for each in (one, two, other):
        scheduler.add(each)
    for prefilled in (8, 16):
        play(scheduler, scheduler.next_turn(), lambda: 1)
        assert (one.num_prefilled, two.slot, other.slot) == (prefilled, None, None)
    play(scheduler, scheduler.next_turn(), lambda: 1)
    turn = scheduler.next_turn()
    assert two in turn.placed
    assert two.num_cached == scheduler.reused_tokens == 16
    assert two.pages[:4] == one.pages[:4]
