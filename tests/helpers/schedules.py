"""Random schedules of arrivals, steps and aborts, compared with plain decoding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import mtpc
from helpers.oracles import DraftOracle
from helpers.theorem import poison
from mtpc.engine.request import Request

BASE = torch.randint(2, 96, (22,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [
    [*BASE[:length], *tail]
    for length in (1, 4, 8, 9, 13, 20)
    for tail in ((), (7,), (7, 9, 11), (9, 4))
]
"""They share prefixes that end at, before and after the ends of pages and chunks."""
PRESSED: dict[str, Any] = {"num_pages": 12, "batch_buckets": (1, 3)}
"""11 pages of 4 tokens: the longest request alone fits, three do not."""
MASKABLE: dict[str, Any] = {**PRESSED, "num_pages": 40, "sampling": True, "token_mask": True}


class Session:
    """A compiled model with memoised oracles, and counts of events over all schedules."""

    def __init__(self, spec: mtpc.SpecModel, plain: Any):
        self.spec, self.plain = spec, plain
        self.drafter = DraftOracle(plain)
        self.seen: Counter[str] = Counter()
        self._drafts: dict[tuple[int, ...], list[int]] = {}

    def drafts(self, text: list[int]) -> list[int]:
        key = tuple(text)
        if key not in self._drafts:
            count = self.spec.options.spec_tokens
            self._drafts[key] = self.drafter.drafts(text, count) if count else []
        return self._drafts[key]

    def check_drafts(self) -> None:
        """Check that the state rows have the last token and the oracle's drafts."""
        rows = self.spec.program.shared["state.token_ids"]
        for request in self.spec.engine.running:
            if request.is_prefilled:
                text = self.text(request)
                if text is not None:
                    found = rows[request.slot].tolist()
                    assert found == [text[-1], *self.drafts(text)]
                    self.seen["drafts compared"] += 1

    def text(self, request: Request) -> list[int] | None:
        """A request's text, including tokens that are not read yet; None if it has ended unread."""
        if not request.num_unread:
            return request.prompt_ids + request.output_ids
        shared = self.spec.program.shared
        if shared["state.remaining_tokens"][request.slot] == 0:
            return None
        length = int(shared["state.committed_lens"][request.slot]) + 1
        new, stops = request.max_new_tokens, bool(request.stop_ids)
        text = request.prompt_ids + self.plain.generate(request.prompt_ids, new, stops)
        known = request.num_tokens
        assert text[:known] == request.prompt_ids + request.output_ids
        assert known < length <= known + request.num_unread
        self.seen["unread"] += 1
        return text[:length]

    def check_empty(self) -> None:
        """Check that pages, request slots and references are as at the start."""
        engine = self.spec.engine
        assert not engine.has_work
        assert engine.pages.num_free == engine.pages.count
        assert not any(engine.pages.users(p) for p in range(engine.pages.count + 1))
        assert engine.slots.num_free == engine.slots.count


arrivals = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 12), st.booleans()),
    min_size=1,
    max_size=3,
)


class Schedules(RuleBasedStateMachine):
    """add, abort and step in any order; every finished request equals plain decoding."""

    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.session.spec.engine
        self.wanted: dict[int, list[int]] = {}
        self.found: dict[int, list[int]] = {}

    @initialize()
    def begin(self) -> None:
        """Begin with poisoned memory and an empty index."""
        poison(self.session.spec)
        before = self.session.spec.stats
        self.before = (before.preemptions, before.reused_tokens)

    @rule(drawn=arrivals)
    def add(self, drawn: list[tuple[int, int, bool]]) -> None:
        for prompt, new, stops in drawn:
            ends = tuple(self.session.plain.stop_ids) if stops else ()
            request_id = self.engine.add(PROMPTS[prompt], new, ends)
            self.wanted[request_id] = self.session.plain.generate(PROMPTS[prompt], new, stops)
            self.found[request_id] = []

    @precondition(lambda self: self.wanted)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                found, wanted = self.found[output.request_id], self.wanted[output.request_id]
                found += output.token_ids
                assert found == wanted[: len(found)]
                if output.finish_reason is not None:
                    assert found == wanted
                    assert output.finish_reason in ("length", "stop")
                    del self.wanted[output.request_id]
                    self.session.seen["finished"] += 1

    @precondition(lambda self: self.wanted)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        request_id = sorted(self.wanted)[which % len(self.wanted)]
        self.engine.abort(request_id)
        self.engine.abort(request_id)
        del self.wanted[request_id]
        self.session.seen["aborted"] += 1

    @invariant()
    def drafts_are_right(self) -> None:
        self.session.check_drafts()

    @invariant()
    def pages_add_up(self) -> None:
        held = Counter(page for r in self.engine.running for page in r.pages)
        pool = self.engine.pages
        assert all(pool.users(page) == count for page, count in held.items())
        assert pool.num_free == pool.count - len(held)
        assert len(self.engine.running) + len(self.engine.waiting) == len(self.wanted)

    def teardown(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.step(1)
            self.session.check_drafts()
            steps += 1
            assert steps < 2000, "livelock"
        assert not self.wanted
        self.session.check_empty()
        stats = self.session.spec.stats
        self.session.seen["preemptions"] += stats.preemptions - self.before[0]
        self.session.seen["reused tokens"] += stats.reused_tokens - self.before[1]


def run_schedules(session: Session, count: int) -> None:
    """Draw `count` schedules; the events that they should cover must have happened."""
    machine = type("BoundSchedules", (Schedules,), {"session": session})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seen = session.seen
    engine, stats = session.spec.engine, session.spec.stats
    assert seen["finished"] > count
    assert seen["preemptions"] >= count / 10  # Fewest at K = 0, whose requests need fewest pages.
    assert (seen["reused tokens"] > count) == (engine.scheduler.prefixes is not None)
    assert seen["aborted"] > count / 4
    assert stats.prefill_prompts > 1.1 * stats.prefill_steps, "prompts share chunks"
    if session.spec.options.spec_tokens:
        assert seen["drafts compared"] > count
        assert 0 < stats.acceptance_rate < 1


LATER_FAMILIES = [
    pytest.param(family, 3, 40, marks=pytest.mark.slow)  # Compiling them takes longest.
    for family in ("step3p7", "mimo_v2", "qwen3_next", "deepseek_v4")
]
