"""Failures and interrupts in the middle of a step: it ends, and its requests go on as if it had not
been. No token is lost or told twice, no page or slot either."""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers.records import MASKED, NEW, STOP, Records, wanted
from helpers.sampling_oracle import SamplingOracle
from helpers.schedules import PRESSED, Session
from helpers.theorem import PROMPTS, poison

import mtpc
from mtpc.engine import engine as engine_module
from mtpc.engine import runner as runner_module
from mtpc.engine.engine import Engine
from mtpc.engine.outbox import Outbox
from mtpc.engine.request import Request, StepOutput
from mtpc.errors import ServingError

HERE = str(Path(engine_module.__file__).parent)


def fresh(model: mtpc.SpecModel, reads_late: bool = False) -> mtpc.SpecModel:
    """An engine of this test alone, on the same program."""
    options = replace(model.options, async_scheduling=reads_late)
    made = mtpc.SpecModel(model.served, options, model.program, model.loaded)
    poison(made)
    return made


def working(engine: Engine) -> Iterator[None]:
    """As long as an engine has work, which a few hundred steps must end."""
    for _ in range(500):
        if not engine.has_work:
            return
        yield
    raise AssertionError("requests wait for ever")


class Texts:
    """What requests are told: every other one by a callback, the others by `step`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told: dict[int, list[StepOutput]] = {}
        self.by_callback: set[int] = set()
        self.expected: dict[int, list[int]] = {}

    def add(self, prompt: list[int], new: int, expected: list[int], **more: Any) -> int:
        outputs: list[StepOutput] = []
        by_callback = len(self.expected) % 2 == 0
        more |= {"on_output": outputs.append} if by_callback else {}
        request_id = self.engine.add(prompt, new, **more)
        self.told[request_id], self.expected[request_id] = outputs, expected
        if by_callback:
            self.by_callback.add(request_id)
        return request_id

    def take(self, outputs: list[StepOutput]) -> None:
        """Of a step."""
        for output in outputs:
            if output.request_id not in self.by_callback:
                self.told[output.request_id].append(output)

    def failed(self) -> set[int]:
        """Those that ended with an error. What they were told is the begin of their text; each of
        the others has all of it, once."""
        failed = set()
        for request_id, outputs in self.told.items():
            text = [token for output in outputs for token in output.token_ids]
            reasons = [output.finish_reason for output in outputs if output.finish_reason]
            expected = self.expected[request_id]
            if "error" in reasons:
                failed.add(request_id)
                assert text == expected[: len(text)], request_id
                assert isinstance(outputs[-1].error, ServingError)
            else:
                assert text == expected, request_id
                assert reasons in (["length"], ["stop"]), (request_id, reasons)
        return failed


Place = Callable[[Engine], tuple[Any, str]]
PLACES: dict[str, Place] = {
    "scheduling": lambda engine: (engine.scheduler, "next_turn"),
    "admission": lambda engine: (engine.scheduler, "_place"),
    "the page pool": lambda engine: (engine.pages, "take"),
    "rows of chunks": lambda engine: (runner_module, "write_chunks"),
    "rows of pages": lambda engine: (runner_module, "write_new_pages"),
    "masks": lambda engine: (engine.runner, "_write_masks"),
    "the batch": lambda engine: (engine.program, "set_batch"),
    "the replay": lambda engine: (engine.program, "run"),
    "snapshots": lambda engine: (engine.runner.states, "save_prompts"),
    "the results": lambda engine: (runner_module.Readout, "read"),
    "counts": lambda engine: (runner_module.PendingStep, "count_drafts"),
    "the policy": lambda engine: (engine.runner.tiers, "observe_drafts"),
    "log-probabilities": lambda engine: (runner_module, "read_logprobs"),
    "the index": lambda engine: (engine.scheduler, "learn"),
    "the outbox": lambda engine: (engine._outbox, "put"),
    "the end of a request": lambda engine: (engine._outbox, "leave"),
}


BY_DEFAULT = ((RuntimeError, False), (KeyboardInterrupt, True))
"""Ways to fail of the default run, which takes them in turn."""


@pytest.mark.parametrize(
    ("place", "kind", "reads_late"),
    [
        pytest.param(place, *way, marks=[pytest.mark.slow] * (way != BY_DEFAULT[index % 2]))
        for index, place in enumerate(PLACES)
        for way in product((RuntimeError, KeyboardInterrupt), (False, True))
    ],
)
def test_a_failure_ends_the_step_alone(
    place: str,
    kind: type[BaseException],
    reads_late: bool,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before and after what is called there; every request has its text."""
    spec, plain = fresh(compiled("mimo", 2, **PRESSED), reads_late), oracle("mimo")
    engine, calls, raised = spec.engine, 0, 0
    owner, name = PLACES[place](engine)
    real = getattr(owner, name)
    if place == "rows of pages":
        at: tuple[int, ...] = (1, 4)
    else:
        at = (2, 4, 8, 13)

    def breaks(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in at[::2]:
            raise kind("before")
        found = real(*given, **more)
        if calls in at[1::2]:
            raise kind("after")
        return found

    monkeypatch.setattr(owner, name, breaks)
    texts = Texts(engine)
    for prompt in PROMPTS[5:10]:
        texts.add(prompt, 11, plain.generate(prompt, 11, stop=False))
    for _ in working(engine):
        try:
            texts.take(engine.step())
        except kind:
            raised += 1
            engine.abort(-1)  # A call finds all whole, whatever it is.
            assert not engine.running
            assert engine.pages.num_free == engine.pages.count
            assert engine.slots.num_free == engine.slots.count
    assert raised >= 2
    assert texts.failed() == set()
    Session(spec, plain).check_empty()


def may_interrupt(frame: FrameType, event: str) -> bool:
    """Whether a signal can be handled here. A function that takes the engine's lock is interrupted
    between its lines, but for the `with` and the `try` themselves: CPython handles no signal
    between the lock and the instructions of its block."""
    if frame.f_code is Outbox.take.__code__:  # What it returns is the caller's.
        return False
    takes_lock = "in_turn" in frame.f_code.co_names
    frame.f_trace_opcodes = not takes_lock
    if not takes_lock:
        return event == "opcode"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return event == "line" and not line.strip().startswith(("with ", "try:"))


class Interrupts:
    """Raises KeyboardInterrupt before some instruction of the engine's own files.

    Attributes:
        count: instructions since `during` began.
        interrupted: names of the functions in which an interrupt came.
    """

    def __init__(self) -> None:
        self.count, self._moment = 0, 0
        self.interrupted = Counter[str]()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if may_interrupt(frame, event):
            self.count += 1
            if self.count == self._moment:
                self.interrupted[frame.f_code.co_name] += 1
                raise KeyboardInterrupt
        return self._trace

    def during(self, action: Callable[[], object], moment: int) -> bool:
        """Run an action. Returns whether it was interrupted at that moment."""
        self.count, self._moment = 0, moment
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)


def check_interrupts(session: Session, count: int) -> Counter[str]:
    """Steps of which a third is interrupted at a random instruction, some twice: a trace ends with
    the interrupt that it raises, so what mends the queues has one of its own."""
    engine, chance, interrupts = session.spec.engine, random.Random(count), Interrupts()
    rebuild, again = engine._rebuild, list[int]()

    def mend(cause: BaseException) -> list[Request]:
        ran: list[Request] = []
        moment = again.pop() if again else 0
        if interrupts.during(lambda: ran.extend(rebuild(cause)), moment):
            raise KeyboardInterrupt
        return ran

    engine._rebuild = mend  # type: ignore[method-assign]
    texts, hits, length = Texts(engine), 0, 4000  # Instructions of a step, as far as is known.
    while hits < count or engine.has_work:
        if hits < count and len(engine.waiting) + len(engine.running) < 4:
            prompt, new = chance.choice(PROMPTS), chance.randint(1, 9)
            texts.add(prompt, new, session.plain.generate(prompt, new, stop=False))
        if hits < count and chance.random() < 0.35:
            moment = chance.choice((chance.randint(1, length), length - chance.randint(0, 700)))
            again[:] = [chance.randint(1, 900)] * (chance.random() < 0.3)
            if interrupts.during(lambda: texts.take(engine.step()), max(1, moment)):
                hits, length = interrupts.interrupted.total(), int(1.05 * length)
            else:
                length = interrupts.count
            again.clear()
        else:
            texts.take(engine.step())
    session.check_empty()
    failed = texts.failed()
    assert failed <= texts.by_callback, "only a callback that was interrupted loses its request"
    told = ("_tell", "hand_out", "_note", "_advance", "step")
    assert len(failed) <= sum(interrupts.interrupted[name] for name in told)
    assert engine.stats.finished["error"] <= len(failed)
    assert len(texts.told) > count / 20
    return interrupts.interrupted


@pytest.mark.parametrize(
    "reads_late", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "late"]
)
def test_interrupts_at_any_instruction(
    reads_late: bool, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    session = Session(fresh(compiled("mimo", 2, **PRESSED), reads_late), oracle("mimo"))
    seen = check_interrupts(session, 150)
    assert len(seen) > 15, seen


@pytest.mark.slow
@pytest.mark.parametrize("reads_late", [False, True], ids=["at once", "late"])
def test_interrupts_at_length(
    reads_late: bool, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    session = Session(fresh(compiled("mimo", 2, **PRESSED), reads_late), oracle("mimo"))
    seen = check_interrupts(session, 3000)
    assert {"_rebuild", "restart", "hand_out", "emit", "settle", "_tell"} <= seen.keys(), seen


@pytest.mark.parametrize(
    "name", ["emit", "telling", pytest.param("end of a request", marks=pytest.mark.slow)]
)
def test_each_instruction(
    name: str,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one call in a step, at each moment in turn: every output is told once, or its callback was
    at work and is told that its request ended."""
    session = Session(fresh(compiled("mimo", 2, **PRESSED)), oracle("mimo"))
    engine, interrupts, failures, moment = session.spec.engine, Interrupts(), 0, 0
    expected, was_interrupted = session.plain.generate(PROMPTS[3], 2, stop=False), True
    places = {"emit": (Request, "emit"), "telling": (engine._outbox, "hand_out")}
    owner, method = places.get(name, (engine._outbox, "leave"))
    real, calls = getattr(owner, method), 0

    def call(*given: Any) -> None:
        nonlocal calls, was_interrupted
        calls += 1
        if calls == (6 if name == "emit" else 2):  # The last output has a request's end.
            was_interrupted = interrupts.during(lambda: real(*given), moment)
            if was_interrupted:
                raise KeyboardInterrupt
        else:
            real(*given)

    monkeypatch.setattr(owner, method, call)
    while was_interrupted:
        texts, calls, moment = Texts(engine), 0, moment + 1
        for _ in range(3):
            texts.add(PROMPTS[3], 2, expected)
        for _ in working(engine):
            with suppress(KeyboardInterrupt):
                texts.take(engine.step())
        failed = texts.failed()
        assert len(failed) <= (name == "telling")
        failures += len(failed)
        session.check_empty()
    assert moment > {"telling": 150, "emit": 40}.get(name, 20)
    assert failures < moment / 2
    assert bool(failures) == (name == "telling")


def test_an_abort_is_told_after_an_interrupt(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """At each moment of the call: it is told once, and nothing stays behind."""
    session = Session(fresh(compiled("mimo", 2, **PRESSED)), oracle("mimo"))
    engine, interrupts, moment, went_on = session.spec.engine, Interrupts(), 0, True
    while went_on:
        told: list[StepOutput] = []
        request_id = engine.add(PROMPTS[3], 8, on_output=told.append)
        engine.step()
        moment, before = moment + 1, len(told)
        went_on = interrupts.during(lambda number=request_id: engine.abort(number), moment)
        engine.abort(request_id)
        for _ in working(engine):
            engine.step()
        assert len(told) == before + 1 or (len(told), told[-1].error) != (before + 2, None)
        assert told[before].finish_reason in ("aborted", "error"), moment
        assert told[before].finish_reason == "aborted" or went_on
        session.check_empty()
    assert moment > 100


class Brittle(Records):
    """A grammar that is interrupted at its n-th token."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def advance(self, token_id: int) -> bool:
        taken = super().advance(token_id)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return taken


@pytest.mark.parametrize("at", [1, 4, 9, 14, 20])
def test_a_grammar_that_is_interrupted_ends_its_own_request(
    at: int,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[[str], SamplingOracle],
) -> None:
    """It may have taken some of its tokens or none. Another grammar goes on, for it rests."""
    spec, plain = fresh(compiled("mimo", 3, **MASKED)), sampling_oracle("mimo")
    texts, greedy = Texts(spec.engine), mtpc.SamplingParams()
    grammars = (None, Records(), Brittle(at))
    for prompt, grammar in zip(PROMPTS[4:7], grammars, strict=True):
        text = wanted(plain, prompt, greedy) if grammar else plain.generate(prompt, NEW, greedy)
        texts.add(prompt, NEW, text, stop_ids=(STOP,), grammar=grammar)
    raised = 0
    for _ in working(spec.engine):
        try:
            texts.take(spec.engine.step())
        except KeyboardInterrupt:
            raised += 1
    assert raised == 1
    assert len(texts.failed()) == 1
    (output, *_) = [o for outputs in texts.told.values() for o in outputs if o.error]
    assert isinstance(output.error, ServingError)
    assert isinstance(output.error.__cause__, KeyboardInterrupt)
    Session(spec, oracle("mimo")).check_empty()


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_grammar_survives_a_replay_that_fails(
    kind: type[BaseException],
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[[str], SamplingOracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, plain = fresh(compiled("mimo", 3, **MASKED)), sampling_oracle("mimo")
    engine, texts, greedy = spec.engine, Texts(spec.engine), mtpc.SamplingParams()
    for prompt in PROMPTS[4:7]:
        text = wanted(plain, prompt, greedy)
        texts.add(prompt, NEW, text, stop_ids=(STOP,), grammar=Records())
    real, calls = engine.program.run, 0

    def breaks(key: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(key)
        if calls in (2, 5, 6, 9):
            raise kind("the device fell off")
        return found

    monkeypatch.setattr(engine.program, "run", breaks)
    raised = 0
    for _ in working(engine):
        try:
            texts.take(engine.step())
        except kind:
            raised += 1
    assert raised == 4
    assert texts.failed() == set()
    Session(spec, oracle("mimo")).check_empty()
