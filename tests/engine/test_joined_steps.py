"""Requests that decode in the prefill steps of others: text, drafts, acceptance, and no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.families import FAMILY_NAMES, NEAR_FAMILIES
from helpers.sampling_oracle import FILTERS
from helpers.schedules import PROMPTS, Session
from helpers.theorem import poison
from hypothesis import given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.layout import StepKey
from mtpc.step.metadata import BeginPrefill, LogitsRows
from mtpc.step.records import Begun

WIDE: dict[str, Any] = {
    "prefill_chunk": 24, "busy_prefill_chunk": 5, "prefill_rows": 3, "batch_buckets": (3,),
}  # fmt: skip
"""Room for chunks of five tokens beside two requests that decode, whatever K is up to 4."""
EACH_KIND_OF_STATE = [
    pytest.param(n, marks=[pytest.mark.slow] * (n != "mimo"))
    for n in (*FAMILY_NAMES, *NEAR_FAMILIES)
]
"""The theorem has joined steps of all kinds of state."""
NEW = 16
FIRST, *LATER = PROMPTS[5], PROMPTS[-1], PROMPTS[-4]


KEY = StepKey.prefill(5, 4, 2)
ROW = st.tuples(st.booleans(), st.booleans(), st.integers(-1, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(ROW, min_size=5, max_size=5))
def test_rows(drawn: list[tuple[bool, bool, int]]) -> None:
    """Where each request's rows begin, what they hold, and which of them choose; row by row."""
    is_on, decodes = (torch.tensor(column) for column in list(zip(*drawn, strict=True))[:2])
    num_input = torch.tensor([count for *_, count in drawn]).int()
    slots = torch.arange(1, 6)
    remaining = torch.cat([torch.zeros(1), is_on]).int()
    token_ids = 60 + torch.arange(18).view(6, 3)
    committed, table = torch.arange(6).int(), torch.zeros(6, 4).int()
    out = BeginPrefill(KEY, 4, 96)(
        slots, committed, remaining, token_ids, torch.arange(20), num_input, decodes.int(), table
    )
    begun = Begun(*out)
    ids, starts, certain = begun.ids, begun.query_start_loc, begun.certain_lens
    rows, logits_starts, places, is_first = LogitsRows(KEY)(starts, decodes.int())
    begin = packed = chosen = 0
    full = False
    for row, (on, decoding, count) in enumerate(drawn):
        length = 3 if decoding else max(count, 0)
        full |= on and begin + length > 20
        length = length if on and not full else 0
        assert starts[row : row + 2].tolist() == [begin, begin + length]
        expected = token_ids[row + 1] if decoding else torch.arange(packed, packed + length)
        assert ids[begin : begin + length].tolist() == expected[:length].tolist()
        assert int(certain[row]) == (min(length, 1) if decoding else length)
        begin += length
        packed += max(count, 0) * (on and not decoding)
        wanted = range(begin - (3 if decoding else 1), begin) if length else range(0)
        assert rows[chosen : chosen + len(wanted)].tolist() == [*wanted]
        mine = slice(3 * row, 3 * row + 3)
        assert is_first[mine].tolist() == [j < len(wanted) for j in range(3)]
        if wanted:
            last = chosen + len(wanted) - 1
            assert places[mine].tolist() == [min(chosen + j, last) for j in range(3)]
        chosen += len(wanted)
        assert int(logits_starts[row + 1]) == chosen
    assert ((rows >= 0) & (rows < 20)).all()


@dataclass
class Text:
    """What a request got."""

    steps: list[int] = field(default_factory=list)
    """Tokens of each of its steps."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def run(
    spec: mtpc.SpecModel, first: list[int] = FIRST, *later: list[int], **params: Any
) -> tuple[list[Text], list[int]]:
    """One request, and others once it decodes; what they got, and how much the first one got of
    each step in which there was a prompt."""
    texts = {spec.engine.add(first, NEW, **params): Text()}
    waiting, beside = list(later), []
    while spec.engine.has_work:
        before = spec.stats.joined.steps
        outputs = {output.request_id: output for output in spec.engine.step()}
        for request_id, output in outputs.items():
            texts[request_id].steps.append(len(output.token_ids))
            texts[request_id].token_ids += output.token_ids
            texts[request_id].logprobs += output.logprobs or []
        if spec.stats.joined.steps > before and min(texts) in outputs:
            beside.append(len(outputs[min(texts)].token_ids))
        while waiting and texts[min(texts)].token_ids:
            texts[spec.engine.add(waiting.pop(0), NEW, **params)] = Text()
    return list(texts.values()), beside


@pytest.mark.parametrize(
    "spec_tokens", [*(pytest.param(k, marks=pytest.mark.slow) for k in (0, 1)), 3]
)
@pytest.mark.parametrize("family", EACH_KIND_OF_STATE)
def test_text_and_acceptance(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Plain decoding's tokens, from wild memory; and as many at a time as alone, so that no draft
    is another one, whether a joined step makes or verifies it."""
    spec, plain = compiled(family, spec_tokens, **WIDE), oracle(family)
    poison(spec)
    texts, beside = run(spec, FIRST, *LATER)
    assert [text.token_ids for text in texts] == [
        plain.generate(prompt, NEW, False) for prompt in (FIRST, *LATER)
    ]
    assert beside, "some steps were of both kinds"
    alone = [run(spec, prompt)[0][0].steps for prompt in (FIRST, *LATER)]
    assert [text.steps for text in texts] == alone
    accepting = [count for text in texts for count in text.steps]
    assert spec_tokens == 0 or max(accepting) > 1, "drafts were accepted"


@pytest.mark.parametrize("family", ["mimo", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_drafts(family: str, compiled: Callable[..., Any], oracle: Callable[..., Any]) -> None:
    """Those that a joined step makes are an uncached chain's, of prompts and of who decodes."""
    session = Session(compiled(family, 3, **WIDE), oracle(family))
    engine = session.spec.engine
    engine.add(FIRST, NEW)
    while engine.has_work:
        before = session.spec.stats.joined.steps
        engine.step()
        if session.spec.stats.joined.steps > before:
            session.check_drafts()
        if len(engine.running) == 1 and not engine.running[0].output_ids[1:]:
            engine.add(LATER[0], NEW)
    assert session.seen["drafts compared"] > 2


def test_who_decodes_never_waits(compiled: Callable[..., Any]) -> None:
    """An output of each step, and a chunk in each; where the step has one row, of each other."""
    for rows, most in ((3, 1), (1, 2)):
        spec = compiled("mimo", 3, **{**WIDE, "prefill_rows": rows})
        engine, first = spec.engine, spec.engine.add(FIRST, 40)
        while not engine.step():
            pass
        fresh = LATER[0][::-1]  # No test before has left its pages.
        second, chunks, got = engine.add(fresh, 2), spec.stats.prefill_steps, list[set[int]]()
        while not any(second in each for each in got):
            got.append({output.request_id for output in engine.step()})
        assert all(first in set.union(*got[i : i + most]) for i in range(len(got) - most + 1))
        assert len(got) <= most * (spec.stats.prefill_steps - chunks)
        assert spec.stats.prefill_steps - chunks > 3
        engine.abort(first)
        engine.abort(second)


@pytest.mark.slow
def test_sampled_texts_are_those_of_requests_alone(compiled: Callable[..., Any]) -> None:
    """Filters, penalties and log-probabilities are of a request's own rows, wherever these are."""
    spec = compiled("mimo", 2, sampling=True, **WIDE)
    for params in FILTERS.values():
        asked = dict(sampling=replace(params, logprobs=2), stop_ids=spec.served.stop_ids)
        found, beside = run(spec, FIRST, *LATER, **asked)
        for text, prompt in zip(found, (FIRST, *LATER), strict=True):
            ((alone,), _) = run(spec, prompt, **asked)
            assert text.token_ids == alone.token_ids
            for one, other in zip(text.logprobs, alone.logprobs, strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert len(text.logprobs) == len(text.token_ids)
        assert beside
