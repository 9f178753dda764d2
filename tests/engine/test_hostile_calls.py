"""Calls that a person gets wrong and an attacker gets right: one clear error, and no one else's."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.schedules import MASKABLE, PRESSED, Session
from helpers.theorem import PROMPTS

import mtpc
from mtpc.engine import runner as runner_module
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.engine import MAX_FAILURES, Engine
from mtpc.engine.request import Request, StepOutput
from mtpc.errors import RequestError, ServingError


@pytest.fixture
def session(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> Session:
    """An engine of this test alone: a dead one harms no other test."""
    made = compiled("mimo", 2, **PRESSED)
    spec = mtpc.SpecModel(made.served, made.options, made.program, made.loaded)
    return Session(spec, oracle("mimo"))


@pytest.fixture
def engine(session: Session) -> Engine:
    return session.spec.engine


def run(engine: Engine) -> dict[int, list[StepOutput]]:
    """Step to the end; outputs by request."""
    found: dict[int, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


# ------------------------------------------------------------------------------ at the door

STOPS = [(2**63,), (-1,), (-(2**70),), (96,), (True,), (1.5,), ("a",), 5, "12", {1: 2}, {1}, None]


@pytest.mark.parametrize("stops", STOPS, ids=repr)
def test_stop_ids_out_of_range(engine: Engine, stops: Any) -> None:
    """At 2**63 an id would overflow the state's tensor, in every later step."""
    with pytest.raises(RequestError, match="stop_ids"):
        engine.add([3], 4, stops)
    assert not engine.has_work


PROMPTS_NOT = [[True], [2.5], ["a"], [2**63], [None], "34", {3: 4}, {3}, 5, None, b"34", [[3]]]


@pytest.mark.parametrize("prompt", PROMPTS_NOT, ids=repr)
def test_prompts_that_are_none(session: Session, prompt: Any) -> None:
    engine = session.spec.engine
    with pytest.raises(RequestError, match="prompt"):
        engine.add(prompt, 4)
    assert not engine.has_work


GENERATED = [
    ("\ud800", {}, "surrogate"),
    (["b\udfff"], {}, "character 1, a lone surrogate"),
    ({"prompt": "a"}, {}, "a dict"),
    ({3, 4}, {}, "a set"),
    (b"abc", {}, "bytes"),
    (5, {}, "an int"),
    ([3, None], {}, "prompt"),
    ([True, 3], {}, "prompt"),
    ([[3], {"a": 1}], {}, "a dict"),
    ([3], {"stop_ids": 5}, "stop_ids is 5; expected token ids"),
    ([3], {"stop_ids": "12"}, "stop_ids is '12'"),
    ([3], {"stop_ids": [2**63]}, "stop_ids has 9223372036854775808; expected ids in 0..95"),
    ([3], {"max_new_tokens": "5"}, "max_new_tokens is '5'"),
    ([3], {"max_new_tokens": None}, "max_new_tokens is None"),
    ([3], {"sampling": 5}, "sampling is 5; expected mtpc.SamplingParams"),
    ([3], {"sampling": {"temperature": 1}}, "sampling is {'temperature': 1}"),
    ([3], {"sampling": [5]}, "sampling is 5"),
    ([3], {"grammar": 5}, "grammar is 5"),
    ([3], {"max_tokens": 5}, "unknown argument 'max_tokens'; use max_new_tokens"),
    ([3], {"max_length": 5}, "use max_new_tokens"),
    ([3], {"stop_token_ids": 5}, "stop_token_ids is 5; expected token ids"),
    ([3], {"stop_token_ids": ["a"]}, "stop_token_ids has 'a'"),
    ([3], {"stop_token_ids": [96]}, "stop_token_ids has 96; expected ids in 0..95"),
    ([3], {"stop_token_ids": range(9)}, "stop ids; at most 8"),
    ([3], {"eos_token_id": 5}, "use stop_ids"),
    ([3], {"stop_strings": "a"}, "use stop"),
    ([3], {"sampling_params": None}, "use sampling"),
    ([3], {"do_sample": True}, "use temperature"),
    ([3], {"min_new_tokens": 3}, "use min_tokens"),
    ([3], {"repeat_penalty": 1.1}, "use repetition_penalty"),
    ([3], {"max_new_token": 3}, "did you mean 'max_new_tokens'"),
    ([3], {"num_beams": 3}, "known: max_new_tokens, "),
    ([3], {"temperature": 0.7}, "compile with sampling=True"),
    ([3], {"seed": 2**63}, "seed is 9223372036854775808"),
    ([3], {"logit_bias": {2**63: 1}}, "logit_bias has|greedy decoding only"),
]


@pytest.mark.parametrize(("prompts", "options", "message"), GENERATED, ids=repr)
def test_generate_says_what_is_wrong(
    session: Session, prompts: Any, options: dict[str, Any], message: str
) -> None:
    spec = session.spec
    with pytest.raises(RequestError, match=message):
        spec.generate(prompts, **{"max_new_tokens": 4, **options})
    with pytest.raises(RequestError, match=message):
        spec.stream(prompts, **{"max_new_tokens": 4, **options})
    assert not spec.engine.has_work


def test_asyncio_says_the_same(session: Session) -> None:
    """And the queue goes on."""

    async def main() -> None:
        async with AsyncEngine(session.spec) as engine:
            for prompt, options, message in GENERATED:
                if isinstance(prompt, list) and prompt != [3]:
                    continue  # Several prompts: here a call has one.
                with pytest.raises(RequestError, match=message):
                    async for _ in engine.generate(prompt, **{"max_new_tokens": 4, **options}):
                        pass
            outputs = [o async for o in engine.generate(PROMPTS[4], 6, stop_ids=())]
            wanted = session.plain.generate(PROMPTS[4], 6, stop=False)
            assert [t for o in outputs for t in o.token_ids] == wanted

    asyncio.run(main())
    session.check_empty()


@pytest.mark.parametrize("ids", [(2**63,), (96, 1), (-1,)])
def test_ends_that_the_model_cannot_emit(session: Session, ids: tuple[int, ...]) -> None:
    """generation_config.json may name ids outside the vocabulary: they end no text, and say so."""
    spec = session.spec
    served = replace(spec.served, stop_ids=ids)
    made = mtpc.SpecModel(served, spec.options, spec.program, spec.loaded)
    assert made.served.stop_ids == tuple(i for i in ids if 0 <= i < 96)
    assert any("outside the vocabulary" in reason for reason in made.stats.fallbacks)
    found = made.generate(PROMPTS[4], 6)
    assert found == session.plain.generate(PROMPTS[4], 6, stop=False)[: len(found)]


# ---------------------------------------------------------------------------- inside a step


def test_what_one_request_raises_ends_that_one(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that no check foresaw: its own request ends with the error, the others go on."""
    real = runner_module.write_state

    def breaks(program: Any, request: Request) -> None:
        if request.prompt_ids == PROMPTS[3]:
            raise OverflowError("too big for a tensor")
        real(program, request)

    monkeypatch.setattr(runner_module, "write_state", breaks)
    first, bad, last = (engine.add(PROMPTS[i], 8) for i in (5, 3, 6))
    found = run(engine)
    for request_id, index in ((first, 5), (last, 6)):
        assert tokens(found[request_id]) == session.plain.generate(PROMPTS[index], 8, stop=False)
    (output,) = found[bad]
    assert (output.token_ids, output.finish_reason) == ([], "error")
    assert isinstance(output.error, ServingError)
    assert isinstance(output.error.__cause__, OverflowError)
    with pytest.raises(ServingError, match="too big for a tensor"):
        session.spec.generate([PROMPTS[6], PROMPTS[3]], 8)
    session.check_empty()


def test_a_step_that_always_fails_ends_what_runs_in_it(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whose fault it is: all that ran are told, and the engine works on."""
    real = engine.program.run

    def breaks(key: Any) -> Any:
        if any(request.prompt_ids == PROMPTS[3] for request in engine.running):
            raise RuntimeError("the device fell off")
        return real(key)

    monkeypatch.setattr(engine.program, "run", breaks)
    told: list[StepOutput] = []
    both = engine.add(PROMPTS[3], 8), engine.add(PROMPTS[5], 8, on_output=told.append)
    for _ in range(MAX_FAILURES - 1):
        with pytest.raises(RuntimeError, match="fell off"):
            engine.step()
    ended = engine.step()
    assert {output.request_id for output in ended} == set(both)
    assert {output.finish_reason for output in [*ended, *told]} == {"error"}
    assert all(isinstance(output.error, ServingError) for output in ended)
    session.check_empty()
    again = engine.add(PROMPTS[5], 8)
    assert tokens(run(engine)[again]) == session.plain.generate(PROMPTS[5], 8, stop=False)


# ------------------------------------------------------------------------------- callbacks


def test_a_callback_may_not_step(session: Session, engine: Engine) -> None:
    """It would hand out another request's tokens before those of this step."""
    refused: list[BaseException] = []

    def nosy(output: StepOutput) -> None:
        try:
            engine.step()
        except RequestError as error:
            refused.append(error)

    other: list[StepOutput] = []
    engine.add(PROMPTS[5], 9, on_output=nosy)
    engine.add(PROMPTS[6], 9, on_output=other.append)
    run(engine)
    assert "inside a callback" in str(refused[0])
    assert tokens(other) == session.plain.generate(PROMPTS[6], 9, stop=False)
    session.check_empty()


class Hit(BaseException):
    """As KeyboardInterrupt, or asyncio's CancelledError."""


@pytest.mark.parametrize("kind", [ValueError, Hit])
@pytest.mark.parametrize("aborts", [False, True])
def test_a_callback_ends_its_own_request_alone(
    session: Session, engine: Engine, kind: type[BaseException], aborts: bool
) -> None:
    """Whatever it raises, in `step` or while another's callback aborts it; no output is lost."""
    plain = session.plain
    ids: dict[str, int] = {}
    told: dict[str, list[StepOutput]] = {"one": [], "bad": [], "two": []}

    def one(output: StepOutput) -> None:
        told["one"].append(output)
        if aborts and len(told["one"]) == 2:
            engine.abort(ids["bad"])

    def bad(output: StepOutput) -> None:
        told["bad"].append(output)
        if aborts == bool(output.finish_reason) and len(told["bad"]) < 5:
            raise kind("the consumer is broken")

    for name, index, callback in (("one", 5, one), ("bad", 3, bad), ("two", 6, None)):
        ids[name] = engine.add(PROMPTS[index], 8, on_output=callback or told["two"].append)
    for _ in range(100):
        try:
            engine.step()
        except Hit:
            continue
        if not engine.has_work:
            break
    assert tokens(told["one"]) == plain.generate(PROMPTS[5], 8, stop=False)
    assert tokens(told["two"]) == plain.generate(PROMPTS[6], 8, stop=False)
    assert told["one"][-1].finish_reason == told["two"][-1].finish_reason == "length"
    session.check_empty()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, Hit])
@pytest.mark.parametrize("at", ["each output", "its end"])
def test_a_callback_that_always_raises_starves_no_neighbour(
    session: Session, engine: Engine, kind: type[BaseException], at: str
) -> None:
    """Whoever steps sees it a few times, and the others have their texts."""
    told: dict[str, list[StepOutput]] = {"one": [], "bad": [], "two": []}

    def bad(output: StepOutput) -> None:
        told["bad"].append(output)
        if at == "each output" or output.finish_reason:
            raise kind

    engine.add(PROMPTS[5], 8, on_output=told["one"].append)
    engine.add(PROMPTS[3], 8, on_output=bad)
    engine.add(PROMPTS[6], 8, on_output=told["two"].append)
    raised = 0
    for _ in range(60):
        try:
            engine.step()
        except kind:
            raised += 1
        if not engine.has_work:
            break
    assert 1 <= raised <= 3
    assert tokens(told["one"]) == session.plain.generate(PROMPTS[5], 8, stop=False)
    assert tokens(told["two"]) == session.plain.generate(PROMPTS[6], 8, stop=False)
    assert len(tokens(told["bad"])) <= 8
    session.check_empty()


class Collects:
    """A grammar, or a callback, at whose call the garbage collector frees an abandoned stream."""

    def __init__(self, spec: mtpc.SpecModel, count: int = 1) -> None:
        self.spec, self.count, self.streams = spec, count, list[Any]()

    def fill_mask(self, words: Any) -> None:
        self.collect()

    def advance(self, token_id: int) -> bool:
        return True

    def rollback(self, count: int) -> None: ...

    def collect(self) -> None:
        """Streams in cycles, which nothing else holds."""
        while self.streams:
            cycle: list[Any] | None = [self.streams.pop()]
            cycle.append(cycle)
            cycle = None
        gc.collect()


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the collector could not raise. It has only what this test makes to look at."""
    gc.collect()
    gc.freeze()
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    yield seen
    assert seen == []


@pytest.mark.parametrize(
    "where", ["a grammar", "a callback", "an add", "an abort", "another thread"]
)
def test_an_abandoned_stream_ends(
    compiled: Callable[..., Any], unraised: list[Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the collector finds it: within the step that runs, or the next call."""
    spec = compiled("mimo", 2, **MASKABLE)
    engine, collects = spec.engine, Collects(spec)
    wanted = spec.generate(PROMPTS[6], 8, ignore_eos=True)
    stream = spec.stream(PROMPTS[5], 24, ignore_eos=True)
    next(stream)
    (request,) = engine.running
    collects.streams.append(stream)
    del stream
    found: list[int] = []
    options: dict[str, Any] = {"ignore_eos": True}
    if where == "a grammar":
        options["grammar"] = collects
    elif where == "a callback":
        engine.add(PROMPTS[4], 1, on_output=lambda output: collects.collect())
    else:
        name = {"an add": "add", "an abort": "remove", "another thread": "next_turn"}[where]
        real = getattr(engine.scheduler, name)

        def within(*given: Any) -> Any:
            if where == "another thread":
                thread = threading.Thread(target=collects.collect)
                thread.start()
                thread.join(20)
                assert not thread.is_alive(), "the collector's thread waits for this step"
            else:
                collects.collect()
            return real(*given)

        monkeypatch.setattr(engine.scheduler, name, within)
    for output in spec.stream(PROMPTS[6], 8, **options):
        found += output.token_ids
        if where == "an abort":
            engine.abort(engine.add(PROMPTS[4], 1, on_output=lambda output: None))
    assert found == wanted
    assert request.finish_reason == "aborted"
    assert len(request.output_ids) <= 9, "it ran on"
    while engine.has_work:
        engine.step()
    assert engine.pages.num_free == engine.pages.count


def test_many_abandoned_streams_end(
    compiled: Callable[..., Any], unraised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the interpreter has frames, all at once in the middle of a call."""
    spec = compiled("mimo", 2, **MASKABLE)
    engine, collects = spec.engine, Collects(spec)
    stream = spec.stream([PROMPTS[5]] * 1200, 24, ignore_eos=True)
    next(stream)
    collects.streams.append(stream)
    del stream
    real = engine.scheduler.add
    monkeypatch.setattr(engine.scheduler, "add", lambda r: (collects.collect(), real(r)))
    request = engine.add(PROMPTS[6], 2)
    assert len(engine.waiting) + len(engine.running) == 1201
    engine.abort(request)
    assert not engine.has_work
    assert engine.pages.num_free == engine.pages.count


def test_a_grammar_may_not_change_the_queue(compiled: Callable[..., Any]) -> None:
    """Its methods run in the middle of a step: who calls the engine from there gets an error."""
    spec = compiled("mimo", 2, **MASKABLE)
    engine, seen = spec.engine, list[str]()

    class Nosy:
        def fill_mask(self, words: Any) -> None:
            for call in (
                lambda: engine.abort(other),
                lambda: engine.add([3], 4),
                engine.step,
                engine.reset_prefix_cache,
            ):
                with pytest.raises(RequestError, match="inside a") as refused:
                    call()
                seen.append(str(refused.value))

        def advance(self, token_id: int) -> bool:
            return True

        def rollback(self, count: int) -> None: ...

    wanted = spec.generate(PROMPTS[6], 8, ignore_eos=True)
    other = engine.add(PROMPTS[6], 8)
    engine.add(PROMPTS[5], 8, grammar=Nosy())
    assert tokens(run(engine)[other]) == wanted
    assert len(seen) >= 4
