"""Random schedules of chats on an engine with prefix reuse, compared with runs without reuse.

Both engines run on one program. So a schedule has three parts: fresh runs of all its prompts, the
schedule itself, and the comparison of the drafts. With files of evicted pages, the schedule runs
twice: the second time on a new engine, from poisoned memory and the files. A wrong state of a layer
hardly changes the texts of tiny models, but it changes the rows of later layers. So the rows in
pages are compared, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mtpc
from helpers.plans import changed
from helpers.theorem import FLOAT32_STEPS, poison
from mtpc.engine.engine import Engine
from mtpc.engine.request import Request

Text: TypeAlias = "tuple[int, ...]"
BASES = [
    torch.randint(2, 96, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in (5, 6)
]
TAILS = ((), (7,), (7, 9, 11), (9, 4, 30, 31, 32, 33, 34, 35, 36))
"""Endings of prompts: texts diverge at, before and after page ends."""
NEW, LONGEST = 12, 40
"""New tokens of a fresh run, and the longest beginning of a prompt."""


@dataclass(frozen=True)
class Ask:
    """Requests that arrive together: copies of one prompt.

    Attributes:
        base, length, tail: the prompt is a beginning of `BASES[base]` and one of `TAILS`.
        turn_of: index of the earlier ask of which this is the next turn, or None.
        stripped: number of last tokens of that ask's answer that the turn leaves out.
        new: number of new tokens.
        stop: index of the new token that stops the text, or None.
        copies: number of requests.
    """

    base: int
    length: int
    tail: int
    turn_of: int | None
    stripped: int
    new: int
    stop: int | None
    copies: int


asks = st.builds(
    Ask,
    st.integers(0, 1),
    st.sampled_from((16, 21, 3, 26)),
    st.integers(0, len(TAILS) - 1),
    st.integers(0, 9) | st.integers(0, 9) | st.none(),
    st.sampled_from((0, 0, 1, 5)),
    st.sampled_from((NEW, NEW, 4)),
    st.none() | st.integers(0, 5),
    st.sampled_from((1, 1, 3)),
)
schedules = st.lists(
    st.tuples(asks, st.sampled_from((12, 0, 3)), st.none() | st.none() | st.integers(0, 9)),
    min_size=5,
    max_size=8,
)
"""Arriving requests, the number of steps after them, the index of a request to abort or None."""
Drawn: TypeAlias = "list[tuple[Ask, int, int | None]]"
engines = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from((17, 17, 60)),
        "snapshots": st.sampled_from((99, 3, 1)),
        "snapshot_distance": st.sampled_from((1024, 8, 4)),
        "async_scheduling": st.booleans(),
    }
)


def rows_in_pages(engine: Engine, request: Request) -> dict[str, torch.Tensor]:
    """The final rows of a running request in every page pool, in order of position."""
    size, lookahead = engine.options.page_size, engine.options.spec_tokens
    places = [
        request.pages[i // size] * size + i % size
        for i in range(max(request.num_committed - lookahead, 0))
    ]
    program = engine.program
    names = [name for name in program.shared if program.layout[name].is_paged]
    return {name: program.shared[name].flatten(0, 1)[places] for name in names}


class Fresh:
    """Texts and drafts of a program without reuse, memoised."""

    def __init__(self, spec: mtpc.SpecModel):
        options = changed(spec.options, prefix_caching=False)
        self.spec, self.engine = spec, Engine(spec.program, options, spec.engine.vocab_size)
        self._answers: dict[Text, Text] = {}
        self._drafts: dict[Text, list[int]] = {}
        self.rows: dict[Text, dict[str, torch.Tensor]] = {}

    def answer(self, prompt: Text) -> Text:
        """`NEW` tokens after a prompt."""
        if prompt not in self._answers:
            self._answers[prompt] = self._run(prompt, NEW)
        return self._answers[prompt]

    def drafts(self, text: Text) -> list[int]:
        """The drafts after a text."""
        if text not in self._drafts:
            self._run(text[:-1], 2)
        return self._drafts[text]

    def _run(self, prompt: Text, new: int) -> Text:
        request_id, found = self.engine.add(list(prompt), new), list[int]()
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.request_id == request_id
                found += output.token_ids
            for request in self.engine.running:
                if request.is_prefilled:
                    drafts = self.spec.program.shared["state.token_ids"][request.slot]
                    self._drafts[*prompt, *found] = drafts.tolist()[1:]
                    if new == NEW:
                        self.rows[prompt] = rows_in_pages(self.engine, request)
        return tuple(found)


@dataclass
class Live:
    """A request of a schedule.

    Attributes:
        prompt: its prompt.
        wanted: the expected tokens.
        found: the emitted tokens.
        request: the engine's request.
    """

    prompt: Text
    wanted: Text
    found: list[int]
    request: Request


class Conversations:
    """Schedules on engines of one program, and counts of events over all of them.

    Args:
        spec: the model with the program.
        offload: a directory for the files of each schedule; None: engines keep nothing in files.
    """

    def __init__(self, spec: mtpc.SpecModel, offload: Path | None = None):
        self.spec, self.fresh = spec, Fresh(spec)
        self.program = replace(spec.program, identity="tests")
        self.seen: Counter[str] = Counter()
        self._offload = offload

    def run(self, drawn: Drawn, options: dict[str, Any]) -> None:
        """Run one schedule from poisoned memory."""
        prompts = self._prompts([ask for ask, _, _ in drawn])
        self.seen_drafts: dict[Text, list[int]] = {}
        if self._offload is None:
            self._run(drawn, prompts, options)
        else:
            self.seen["schedules"] += 1
            files = {
                "kv_offload_dir": self._offload / str(self.seen["schedules"]),
                "async_scheduling": False,
            }
            for _ in range(2):
                self._run(drawn, prompts, options | files)
        for text, found in self.seen_drafts.items():
            assert found == self.fresh.drafts(text)
        self.spec.engine.reset_prefix_cache()  # The fresh runs overwrote its pages.

    def _run(self, drawn: Drawn, prompts: list[Text], options: dict[str, Any]) -> None:
        """Run a schedule on a new engine from poisoned memory, and close the engine."""
        poison(self.spec)
        self.engine = self._engine(**options)
        self.live: dict[int, Live] = {}
        for (ask, steps, aborted), prompt in zip(drawn, prompts, strict=True):
            self._add(ask, prompt)
            self._step(steps)
            if aborted is not None and self.live:
                request_id = sorted(self.live)[aborted % len(self.live)]
                self.engine.abort(request_id)
                del self.live[request_id]
        self._step(2000)
        assert not self.live, "livelock"
        self.engine.close()
        self._check_empty()

    def _engine(self, snapshots: int, **options: Any) -> Engine:
        """A new engine on the program, with memory for a number of snapshots."""
        nbytes = self.spec.engine.runner.states.nbytes
        made = changed(self.spec.options, snapshot_bytes=snapshots * nbytes, **options)
        return Engine(self.program, made, self.spec.engine.vocab_size)

    def _prompts(self, drawn: list[Ask]) -> list[Text]:
        """The prompts of a schedule's asks; their answers are known after this."""
        prompts: list[Text] = []
        for ask in drawn:
            prompt = tuple(BASES[ask.base][: ask.length])
            if ask.turn_of is not None and prompts:
                before = prompts[ask.turn_of % len(prompts)]
                answer = self.fresh.answer(before)
                prompt = (*before, *answer[: len(answer) - ask.stripped])
            prompt = (*prompt[:LONGEST], *TAILS[ask.tail])[: LONGEST + 4]
            self.fresh.answer(prompt)
            prompts.append(prompt)
        return prompts

    def _add(self, ask: Ask, prompt: Text) -> None:
        wanted, stops = self.fresh.answer(prompt)[: ask.new], tuple[int, ...]()
        if ask.stop is not None and ask.stop < len(wanted):
            stops = (wanted[ask.stop],)
            wanted = wanted[: wanted.index(stops[0]) + 1]
        for _ in range(ask.copies):
            request = Request(-1, list(prompt), ask.new, stops)
            request_id = self.engine.submit(request)
            self.live[request_id] = Live(prompt, wanted, [], request)

    def _step(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.has_work:
                return
            for output in self.engine.step():
                one = self.live[output.request_id]
                one.found += output.token_ids
                assert tuple(one.found) == one.wanted[: len(one.found)]
                if output.finish_reason is not None:
                    assert tuple(one.found) == one.wanted
                    del self.live[output.request_id]
                    self.seen["reused"] += one.request.num_cached or 0
            self._note_drafts()
            snapshots = self.engine.pages.index.snapshots
            assert snapshots.num_used <= snapshots.count

    def _note_drafts(self) -> None:
        """Record the last token and the drafts of the state rows."""
        shared = self.spec.program.shared
        for one in self.live.values():
            slot = one.request.slot
            if slot is None or not one.request.is_prefilled:
                continue
            self._check_rows(one)
            if int(shared["state.remaining_tokens"][slot]):
                length = int(shared["state.committed_lens"][slot]) + 1
                text = (*one.prompt, *one.wanted)[:length]
                last, *drafts = shared["state.token_ids"][slot].tolist()
                assert (len(text), text[-1]) == (length, last)
                assert self.seen_drafts.setdefault(text, drafts) == drafts
                self.seen["drafts"] += 1

    def _check_rows(self, one: Live) -> None:
        """Compare a running request's rows in pages with those of a fresh run."""
        wanted = self.fresh.rows[one.prompt]
        for name, rows in rows_in_pages(self.engine, one.request).items():
            count = min(len(rows), len(wanted[name]))
            torch.testing.assert_close(
                rows[:count], wanted[name][:count], rtol=0, atol=FLOAT32_STEPS, msg=name
            )

    def _check_empty(self) -> None:
        """Check that pages, request slots and snapshots are free, or idle and indexed."""
        engine, pages = self.engine, self.engine.pages
        snapshots = pages.index.snapshots
        assert pages.num_free == pages.count
        assert engine.slots.num_free == engine.slots.count
        attached = [page for page in pages.index.pages if page in snapshots]
        assert snapshots.num_used == len(attached)
        self.seen["preempted"] += engine.scheduler.num_preemptions
        self.seen["evicted"] += snapshots.num_evicted
        self.seen["kept"] += snapshots.num_used
        stats = engine.stats
        self.seen["loaded"] += stats.offload_loaded
        self.seen["files evicted"] += stats.offload_evictions
        assert not stats.fallbacks
        engine.reset_prefix_cache()
        assert snapshots.num_used == pages.num_idle == 0


def check_reuse(conversations: Conversations, count: int) -> None:
    """Draw `count` schedules; the events that they should cover must have happened."""
    run = given(schedules, engines)(conversations.run)
    settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),  # To shrink a schedule takes longer than to read it.
        suppress_health_check=list(HealthCheck),
    )(run)()
    seen, has_state = conversations.seen, bool(conversations.spec.engine.runner.states.names)
    assert seen["reused"] > 8 * count
    assert seen["drafts"] > 4 * count
    assert seen["preempted"] >= count // 20
    assert bool(seen["evicted"] and seen["kept"]) == has_state
