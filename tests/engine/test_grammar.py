"""Grammars on the engine: text that always obeys, plain constrained decoding's, at every K."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plans import changed
from helpers.records import MASKED, NEW, STATES, STOP, Records, V, run, wanted
from helpers.sampling_oracle import FILTERS
from helpers.schedules import Session
from helpers.theorem import PROMPTS

from mtpc import SamplingParams
from mtpc.engine import grammar_rows as engine_grammar
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.engine import Engine
from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import pack_bits
from mtpc.engine.stream import Output, check_served
from mtpc.errors import GrammarError, NumericsError, RequestError

KINDS = {
    name: dataclasses.replace(FILTERS[name], banned_ids=(), min_tokens=0)
    for name in ("greedy", "temperature", "everything")
}


SLOW = [("mimo", k) for k in (0, 1, 2, 4, "auto")] + [("step3p7", 3), ("qwen3_next", 2)]
"""Every K, K that changes, chained layers, recurrent state."""


@pytest.fixture(
    params=[
        ("mimo", 3),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=lambda case: f"{case[0]}, K={case[1]}",
)
def session(
    request: pytest.FixtureRequest, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> Session:
    family, spec_tokens = request.param
    return Session(compiled(family, spec_tokens, **MASKED), oracle(family))


def test_the_text_is_that_of_plain_constrained_decoding(
    session: Session,
    sampling_oracle: Callable[..., Any],
) -> None:
    """Greedy and sampled, beside requests without grammar, preempted, joining and leaving."""
    spec, plain = session.spec, sampling_oracle(session.plain.name)
    before = (spec.stats.preemptions, sum(spec.stats.accepted), spec.stats.forced_drafts)
    expected, grammars = {}, {}
    names = [*KINDS, "free"] * 3
    for prompt, name in zip(PROMPTS, names, strict=False):
        grammar = None if name == "free" else Records()
        params = KINDS.get(name, FILTERS["temperature"])
        request_id = spec.engine.add(prompt, NEW, (STOP,), params, grammar=grammar)
        grammars[request_id] = grammar
        text = wanted(plain, prompt, params) if grammar else plain.generate(prompt, NEW, params)
        expected[request_id] = text
    gone = spec.engine.add(PROMPTS[4], NEW, (STOP,), grammar=Records())
    found: dict[int, list[int]] = {}
    for _ in range(4):
        for output in spec.engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    spec.engine.abort(gone)
    for request_id, (text, reason, error) in run(spec).items():
        found[request_id] = found.get(request_id, []) + text
        assert reason in ("length", "stop")
        assert error is None
    for request_id, text in expected.items():
        assert found[request_id] == text
        if grammars[request_id] is not None:
            over = text[-1] == STOP
            assert len(grammars[request_id].states) == 1 + len(text) - over
    assert any(text[-1] == STOP and grammars[i] for i, text in expected.items())
    assert spec.stats.preemptions > before[0]
    if spec.options.spec_tokens:
        assert sum(spec.stats.accepted) > before[1]
        assert spec.stats.forced_drafts > before[2]
        assert spec.stats.acceptance_rate < 1
    session.check_empty()


def test_masks_of_drafts_raise_acceptance(
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same text, whether drafts follow the few texts that are possible, or are anything."""
    spec, plain = compiled("mimo", 3, **MASKED), sampling_oracle("mimo")
    accepted = {}
    for few in (0, engine_grammar.FEW):
        monkeypatch.setattr(engine_grammar, "FEW", few)
        before = sum(spec.stats.accepted)
        for prompt in PROMPTS[3:9]:
            params = KINDS["temperature"]
            spec.engine.add(prompt, NEW, (STOP,), params, grammar=Records())
            ((text, *_),) = run(spec).values()
            assert text == wanted(plain, prompt, params)
        accepted[few] = sum(spec.stats.accepted) - before
    assert 0 < accepted[0] < accepted[4]


def ahead_of(state: str, count: int) -> list[list[int]]:
    """Masks of the tokens after the next one, where a record is in a state: if few are possible."""
    texts, found = [state], [torch.full((V // 32,), -1).tolist() for _ in range(count)]
    for place in range(count):
        texts = [then for each in texts for then in STATES[each].values() if then != "over"]
        if not 0 < len(texts) <= engine_grammar.FEW:
            break
        found[place] = pack_bits({token for each in texts for token in STATES[each]}, V).tolist()
    return found


def test_each_row_has_the_masks_of_the_drafts_after_it(compiled: Callable[..., Any]) -> None:
    """Of several requests: what few tokens are possible after each draft that a step reads."""
    spec, changes = compiled("mimo", 3, **MASKED), 0
    for prompt in PROMPTS[:6]:
        spec.engine.add(prompt, NEW, (STOP,), KINDS["temperature"], grammar=Records())
    (step,) = [step for key, step in spec.program.steps.items() if key.phase == "decode"]
    tokens, masks = spec.program.shared["state.token_ids"], step.buffers["batch.draft_mask"]
    while spec.engine.has_work:
        running = [request for request in spec.engine.running if request.is_prefilled]
        rows = [(r.grammar.states[-1], tokens[r.slot].tolist()[1:]) for r in running]
        before = spec.stats.decode_steps
        spec.engine.step()
        if spec.stats.decode_steps == before:
            continue
        for index, (state, drafts) in enumerate(rows):
            if running[index].slot is None:  # It lost its pages to an older one.
                continue
            places, row = [state], 4 * index
            for draft in drafts:
                allowed = STATES[state]
                state = allowed.get(min(allowed) if len(allowed) == 1 else draft, "over")
                if state == "over":
                    break
                places.append(state)
            wanted = [ahead_of(state, 3) for state in places]
            assert masks[row : row + len(wanted)].tolist() == wanted
            changes += wanted.count(wanted[0]) < len(wanted)
    assert changes > 2


class Broken(Records):
    """One that fails in a way of its own once it has taken `after` tokens."""

    def __init__(self, how: str, after: int = 4):
        super().__init__()
        self.how, self.after = how, after

    @property
    def is_due(self) -> bool:
        return len(self.states) > self.after

    def fill_mask(self, words: torch.Tensor) -> None:
        if self.is_due and self.how == "fill":
            raise ValueError("no mask today")
        super().fill_mask(words)
        if self.is_due and self.how == "nothing":
            words.zero_()

    def advance(self, token_id: int) -> bool:
        if self.is_due and self.how == "advance":
            raise ValueError("no token today")
        return not (self.is_due and self.how == "refuse") and super().advance(token_id)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("fill", ValueError, "no mask today"),
        ("advance", ValueError, "no token today"),
        ("refuse", GrammarError, r"allowed token \d+ in its mask, but rejects it"),
        ("nothing", GrammarError, "allows no token after 4 new ones"),
    ],
)
def test_a_broken_grammar_ends_its_own_request(
    how: str,
    kind: type[Exception],
    message: str,
    session: Session,
    sampling_oracle: Callable[..., Any],
) -> None:
    """Its text so far obeys; its neighbours, with and without grammar, hear nothing of it."""
    spec, plain = session.spec, sampling_oracle(session.plain.name)
    params = KINDS["temperature"]
    broken = spec.engine.add(PROMPTS[5], NEW, (STOP,), params, grammar=Broken(how))
    other = spec.engine.add(PROMPTS[6], NEW, (STOP,), params, grammar=Records())
    free = spec.engine.add(PROMPTS[7], NEW, (STOP,), params)
    found = run(spec)
    text, reason, error = found[broken]
    assert reason == "error"
    assert isinstance(error, kind)
    with pytest.raises(kind, match=message):
        raise error
    assert text == wanted(plain, PROMPTS[5], params)[: len(text)]
    assert found[other][0] == wanted(plain, PROMPTS[6], params)
    assert found[free][0] == plain.generate(PROMPTS[7], NEW, params)
    session.check_empty()


def test_generate_and_stream(
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[..., Any],
) -> None:
    """One prompt or several, each with its own grammar or none."""
    session, plain = Session(compiled("mimo", 3, **MASKED), oracle("mimo")), sampling_oracle("mimo")
    spec, params, prompts = session.spec, KINDS["temperature"], PROMPTS[3:7]
    texts = [wanted(plain, prompt, params) for prompt in prompts]
    options: dict[str, Any] = {"stop_ids": [STOP], "sampling": params}
    assert spec.generate(prompts[0], NEW, grammar=Records(), **options) == texts[0]
    texts[1] = plain.generate(prompts[1], NEW, params)
    grammars = [None if i == 1 else Records() for i in range(len(prompts))]
    assert spec.generate(prompts, NEW, grammar=grammars, **options) == texts
    pieces: list[list[int]] = [[] for _ in prompts]
    grammars = [None if i == 1 else Records() for i in range(len(prompts))]
    for output in spec.stream(prompts, NEW, grammar=grammars, **options):
        pieces[output.index] += output.token_ids
    assert pieces == texts
    with pytest.raises(
        GrammarError, match=r"prompt 1: its grammar failed after \d .*no token today"
    ):
        spec.generate(prompts[:2], NEW, grammar=[Records(), Broken("advance")], **options)
    with pytest.raises(RequestError, match="2 grammars for 4 prompts; give one, or None, for each"):
        spec.generate(prompts, NEW, grammar=grammars[:2], **options)
    with pytest.raises(RequestError, match="same grammar, which follows one text"):
        spec.generate(prompts, NEW, grammar=Records(), **options)
    session.check_empty()


def test_async(
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[..., Any],
) -> None:
    """One whose grammar fails, and one whose grammar is another's, hear of it; others go on."""
    session, plain = Session(compiled("mimo", 3, **MASKED), oracle("mimo")), sampling_oracle("mimo")
    spec, params = session.spec, KINDS["temperature"]

    async def collect(engine: AsyncEngine, prompt: list[int], grammar: Any) -> list[int]:
        ids: list[int] = []
        async for output in engine.generate(
            prompt, NEW, stop_ids=[STOP], sampling=params, grammar=grammar
        ):
            ids += output.token_ids
        return ids

    async def main() -> list[Any]:
        shared = Records()
        kinds = [shared, shared, Broken("refuse"), Records(), None]
        async with AsyncEngine(spec) as engine:
            calls = (collect(engine, *pair) for pair in zip(PROMPTS[3:8], kinds, strict=True))
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(main())
    assert isinstance(found[1], RequestError), found[1]
    assert "another request's" in str(found[1])
    assert isinstance(found[2], GrammarError), found[2]
    assert isinstance(found[2].__cause__, GrammarError)
    constrained = [wanted(plain, PROMPTS[i], params) for i in (3, 6)]
    assert [found[0], found[3]] == constrained
    assert found[4] == plain.generate(PROMPTS[7], NEW, params)
    session.check_empty()


def test_what_is_refused(compiled: Callable[..., Any]) -> None:
    spec = compiled("mimo", 3, **MASKED)
    engine = spec.engine
    with pytest.raises(RequestError, match="without fill_mask, advance, rollback; expected"):
        engine.add([5], 3, grammar="[0-9]+")
    with pytest.raises(RequestError, match="which together could forbid every token"):
        engine.add([5], 3, grammar=Records(), sampling=SamplingParams(banned_ids=(4,)))
    shared = Records()
    engine.add([5], 3, grammar=shared)
    with pytest.raises(RequestError, match="another request's; give each its own"):
        engine.add([5], 3, grammar=shared)
    run(spec)
    unmasked = changed(spec.options, token_mask=False)
    plain = Engine(spec.program, unmasked, V)
    with pytest.raises(RequestError, match="compile with sampling=True, token_mask=True"):
        plain.add([5], 3, grammar=Records())


def test_an_error_comes_with_its_own_output() -> None:
    """Not with earlier ones that were taken late, nor behind a stop string."""
    request = Request(-1, [5], 9, error=ValueError("no mask today"), output_ids=[7, 8])
    request.finish_reason = "error"
    for reason in (None, "stop", "length"):
        check_served(Output(0, [7], None, reason), request)
    with pytest.raises(GrammarError, match="prompt 3: its grammar failed after 2 new tokens") as at:
        check_served(Output(3, [], None, "error"), request)
    assert at.value.__cause__ is request.error
    with pytest.raises(NumericsError, match="prompt 0: the model's logits became NaN"):
        check_served(Output(0, [], None, "nonfinite"), request)
