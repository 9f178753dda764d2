"""The theorem as a check of any model: prompts, random requests, and poisoned memory."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

import mtpc
from helpers.oracles import DraftOracle, Oracle
from mtpc.layout import SCRATCH_SLOT

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 21)
"""Prompt lengths just below and above multiples of the page size (4) and the prefill chunk (8)."""
PROMPTS = [
    torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
Drawn: TypeAlias = "list[tuple[int, int, int, int | None]]"
"""A request: the index of its prompt, max_new_tokens, the step after which it joins, and the index
of the token that is its stop token."""
FULL: Drawn = [
    *((place, new, 0, None) for place, new in enumerate((7, 6, 8, 9, 11, 13))),
    *[(2, 15, 0, 5), (0, 20, 0, None), (11, 12, 6, None)],
]
"""Eight requests at once, of which one after the other ends, and one that joins them: batches of
every size, and texts over several pages."""


def requests(least: int, most: int, longest: int) -> st.SearchStrategy[Drawn]:
    """From `least` to `most` requests, of up to `longest` new tokens each."""
    prompts, new = st.integers(0, len(PROMPTS) - 1), st.integers(1, longest)
    request = st.tuples(prompts, new, st.integers(0, most), st.sampled_from([None, 0, 2, 5]))
    return st.lists(request, min_size=least, max_size=most)


FEW = requests(2, 4, 12)


KEPT = ("batch.state_indices", "batch.token_mask", "batch.draft_mask")
"""What the host has written: the requests of a batch, and masks that allow all tokens."""


def poison(spec: mtpc.SpecModel) -> None:
    """Fill everything that a padded row or an unwritten page could read with NaN or invalid ids."""
    assert not spec.engine.has_work
    spec.engine.reset_prefix_cache()
    wild = {torch.int8: 77, torch.int32: 2**30, torch.int64: -(2**40)}

    def fill(tensor: torch.Tensor) -> None:
        tensor.fill_(math.nan if tensor.is_floating_point() else wild[tensor.dtype])

    spec.program.forget_batches()
    for tensor in spec.program.shared.values():
        fill(tensor)
    spec.program.shared["state.remaining_tokens"].fill_(0)
    spec.program.shared["state.remaining_tokens"][SCRATCH_SLOT] = 99
    for step in spec.program.steps.values():
        for name, tensor in step.buffers.items():
            if name.startswith("batch.") and name not in KEPT:
                fill(tensor)
        step.buffers["batch.state_indices"].fill_(SCRATCH_SLOT)


@dataclass
class Seen:
    """Counts of events while random requests ran.

    Attributes:
        spec: the model that served them.
        stopped: requests that a stop token ended.
        split: number of steps after which a prompt was prefilled in part.
        grown: number of steps after which a text had reached another page.
        replays: replays of each step before these requests.
        accepted: accepted drafts at each position before these requests.
        drafted: verified drafts at each position before these requests.
    """

    spec: mtpc.SpecModel
    stopped: int = 0
    split: int = 0
    grown: int = 0
    replays: Counter[Any] = field(default_factory=Counter)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        stats = self.spec.stats
        self.replays = Counter(self.spec.program.replays)
        self.accepted, self.drafted = list(stats.accepted), list(stats.drafted)

    def look(self, before: dict[int, int]) -> None:
        """Count the events of one step; `before` has the number of pages of each request's text."""
        for request in self.spec.engine.running:
            pages = request.num_tokens // self.spec.options.page_size
            self.split += 0 < request.num_prefilled < request.num_input
            self.grown += pages > before.get(request.request_id, pages)
            before[request.request_id] = pages

    def check_all_happened(self) -> None:
        """Assert: all buckets ran, prompts were split, texts reached new pages, requests stopped.

        Drafts were accepted in part: more of the first ones than of the last ones, and not all.
        """
        replays = self.spec.program.replays
        idle = [str(key) for key in self.spec.program.steps if replays[key] <= self.replays[key]]
        assert not idle, "steps that never ran"
        assert min(self.stopped, self.split, self.grown) > 0
        accepted, drafted = (
            [now - then for now, then in zip(counts, before, strict=True)]
            for counts, before in (
                (self.spec.stats.accepted, self.accepted),
                (self.spec.stats.drafted, self.drafted),
            )
        )
        if drafted:
            assert 0 < accepted[0] < drafted[0]
            assert len(drafted) == 1 or accepted[-1] < accepted[0]


def serve(seen: Seen, drawn: Drawn, stops: list[tuple[int, ...]]) -> list[list[int]]:
    """Run requests that join at their own times; returns their finished outputs in order."""
    engine = seen.spec.engine
    outputs: dict[int, list[int]] = {}
    pending = sorted(range(len(drawn)), key=lambda i: drawn[i][2])
    ids: dict[int, int] = {}
    pages: dict[int, int] = {}
    step = 0
    while pending or engine.has_work:
        while pending and drawn[pending[0]][2] <= step:
            index = pending.pop(0)
            prompt, new, _, _ = drawn[index]
            ids[index] = engine.add(PROMPTS[prompt], new, stops[index])
            outputs[ids[index]] = []
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
        seen.look(pages)
        step += 1
        assert step < 400, "requests that never end"
    return [outputs[ids[i]] for i in range(len(drawn))]


def check_theorem(
    spec: mtpc.SpecModel,
    plain: Oracle,
    max_examples: int,
    drawn_from: st.SearchStrategy[Drawn] = FEW,
) -> Seen:
    """Draw batches of requests and compare each output with plain decoding; some stop early.

    Each family and each K has its own random draws.
    """
    seen = Seen(spec)
    own_draws = zlib.crc32(f"{plain.name}, K={spec.options.spec_tokens}".encode())

    def wanted(prompt: int, new: int, stops: tuple[int, ...]) -> list[int]:
        truth = plain.generate(PROMPTS[prompt], new, stop=False)
        ends = [place for place, token in enumerate(truth) if token in stops]
        return truth[: ends[0] + 1] if ends else truth

    @seed(own_draws)
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=drawn_from)
    @example(drawn=FULL)
    def check(drawn: Drawn) -> None:
        stops: list[tuple[int, ...]] = [
            () if at is None else (plain.generate(PROMPTS[p], at + 1, stop=False)[at],)
            for p, _, _, at in drawn
        ]
        expected = [wanted(p, new, s) for (p, new, _, _), s in zip(drawn, stops, strict=True)]
        poison(spec)
        assert serve(seen, drawn, stops) == expected
        lengths = zip(expected, drawn, strict=True)
        seen.stopped += sum(len(text) < new for text, (_, new, _, _) in lengths)

    check()
    assert seen.stopped > 0
    return seen


def check_after_rejection(spec: mtpc.SpecModel, plain: Oracle, num_accepted: int) -> None:
    """Run one request with K = 3 and planted drafts: right ones are accepted, the text is plain."""
    prompt = PROMPTS[8]
    truth = plain.generate(prompt, 12, stop=False)
    poison(spec)
    request_id = spec.engine.add(prompt, 12)
    emitted: list[int] = []
    while not emitted:
        emitted += [t for o in spec.engine.step() for t in o.token_ids]
    slot = spec.engine.running[0].slot
    planted = [t if i < num_accepted else (t + 1) % 96 for i, t in enumerate(truth[1:4])]
    spec.program.shared["state.token_ids"][slot, 1:4] = torch.tensor(planted)
    first = spec.engine.step()[0].token_ids
    assert first == truth[1 : 2 + num_accepted]
    emitted += first
    while spec.engine.has_work:
        emitted += [t for o in spec.engine.step() for t in o.token_ids]
    assert emitted == truth
    assert request_id is not None


def check_drafts(spec: Any, oracle: DraftOracle, prompts: list[list[int]], new: int) -> int:
    """Compare the drafts in the state buffers with the oracle's; returns comparisons made."""
    poison(spec)
    compared = 0
    texts = {spec.engine.add(prompt, new): list(prompt) for prompt in prompts}
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in spec.engine.running:
            if not request.is_prefilled:
                continue
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            text = texts[request.request_id]
            assert found[0] == text[-1]
            assert found[1:] == oracle.drafts(text, spec.options.spec_tokens)
            compared += 1
    return compared


def check_caches(spec: mtpc.SpecModel, prompt: list[int], new: int = 12) -> None:
    """Decode a prompt, then prefill prompt and text at once: the caches hold the same rows.

    For rings, these are the last few rows. Rows that depend on drafts are left out: one of the last
    rows per draft.
    """
    text = [*prompt, *spec.generate(prompt, new, ignore_eos=True)]
    count = len(text) - 1 - spec.options.spec_tokens
    decoded, prefilled = (_rows(spec, start, count) for start in (prompt, text))
    assert decoded
    for name, rows in prefilled.items():
        torch.testing.assert_close(decoded[name], rows, rtol=0, atol=FLOAT32_STEPS, msg=name)


FLOAT32_STEPS = 1e-5
"""The largest difference between rows of two float64 runs.

transformers' norms and routers round to float32, whatever the model's dtype. If products over
different numbers of rows differ by 1e-16, that rounding can make it one step of float32: 2.4e-7 at
2.
"""
IN_RINGS = 6
"""Number of rows that every ring of the tiny models keeps: the width of their windows."""


def _rows(spec: mtpc.SpecModel, start: list[int], count: int) -> dict[str, torch.Tensor]:
    """Rows up to `count` of each cache, of a request that begins with these tokens."""
    poison(spec)
    request_id, final = spec.engine.add(start, 20), count + spec.options.spec_tokens
    while not spec.engine.running or spec.engine.running[0].num_committed < final:
        spec.engine.step()
    (request,), size = spec.engine.running, spec.options.page_size
    num_slots = len(spec.program.shared["state.remaining_tokens"])
    rows = {}
    for name, cache in spec.program.shared.items():
        if not name.startswith("kv."):
            continue
        pages, first = request.pages, 0
        if "ring" in name:
            length = (len(cache) - 1) // (num_slots - 1)
            begin, first = 1 + (request.slot - 1) * length, max(count - IN_RINGS, 0)
            pages = [begin + block % length for block in range(-(-count // size))]
        slots = [pages[i // size] * size + i % size for i in range(first, count)]
        rows[name] = cache.flatten(0, 1)[slots].clone()
    spec.engine.abort(request_id)
    return rows
