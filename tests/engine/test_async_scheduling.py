"""Steps launched before the one before is read: nothing but the moment of reading changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plans import changed, of_backend
from helpers.records import MASKED, NEW, STOP, Records, run, wanted
from helpers.sampling_oracle import FILTERS, SamplingOracle
from helpers.schedules import (
    LATER_FAMILIES,
    MASKABLE,
    PRESSED,
    PROMPTS,
    Session,
    run_schedules,
)
from torch import Tensor

import mtpc
from mtpc.backends.eager import EagerBackend
from mtpc.engine import runner as runner_module
from mtpc.engine.readout import DeviceMoment, Moment, Readout
from mtpc.errors import OptionError, RequestError
from mtpc.layout import Layout, StepKey
from mtpc.layout.buffers import batch_specs
from mtpc.models.load import load
from mtpc.program.build_road import scheduled
from mtpc.program.compiler import StepCompiler
from mtpc.program.program import Program


def read_late(spec: mtpc.SpecModel) -> mtpc.SpecModel:
    """The same program under an engine that reads one step late."""
    options = changed(spec.options, async_scheduling=True)
    return mtpc.SpecModel(spec.served, options, spec.program, spec.loaded)


@pytest.mark.parametrize(
    ("family", "spec_tokens", "count"),
    [
        ("mimo", 2, 10),
        pytest.param("mimo", 0, 15, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 3, 10, marks=pytest.mark.slow),
        *LATER_FAMILIES,
    ],
)
def test_schedules(
    family: str,
    spec_tokens: int,
    count: int,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
) -> None:
    """Those of test_engine: text, drafts, pages and slots, under arrivals, aborts, pressure."""
    session = Session(read_late(compiled(family, spec_tokens, **PRESSED)), oracle(family))
    run_schedules(session, count)
    assert session.seen["unread"] > count


@pytest.fixture
def session(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> Session:
    return Session(read_late(compiled("mimo", 2, **PRESSED)), oracle("mimo"))


def test_the_next_step_is_launched_first(session: Session) -> None:
    """Each call launches one and hands out the one before; the last one only reads."""
    engine, plain = session.spec.engine, session.plain
    before = engine.program.replays.total()
    engine.add(PROMPTS[2], 9)
    assert engine.step() == []
    assert engine.program.replays.total() == before + 1
    (first,) = engine.step()
    assert engine.program.replays.total() == before + 2
    assert first.token_ids == plain.generate(PROMPTS[2], 1, stop=False)
    calls, text, reason = 2, first.token_ids, None
    while reason is None:
        (output,) = engine.step()
        calls, text, reason = calls + 1, text + output.token_ids, output.finish_reason
    assert text == plain.generate(PROMPTS[2], 9, stop=False)
    assert reason == "length"
    launched = engine.program.replays.total() - before
    # Where drafts were accepted the host could not know that a step was the last, and ran one more.
    assert calls - launched in (0, 1)
    assert engine.stats.host_gaps >= launched - 2
    session.check_empty()


def test_no_step_is_launched_behind_the_last_token(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Without drafts the host knows lengths though it has not read: no replay is wasted."""
    spec = read_late(compiled("mimo", 0, **PRESSED))
    before = spec.program.replays.total()
    spec.engine.add(PROMPTS[1], 7)
    ((text, *end),) = run(spec).values()
    assert (text, *end) == (oracle("mimo").generate(PROMPTS[1], 7, stop=False), "length", None)
    assert spec.program.replays.total() - before == 7


def test_statistics_are_those_of_reading_at_once(compiled: Callable[..., Any]) -> None:
    """One request after the other: the same drafts accepted, the same tokens by step."""
    spec = compiled("mimo", 2, **PRESSED)
    counts = []
    for model in (mtpc.SpecModel(spec.served, spec.options, spec.program), read_late(spec)):
        for prompt in PROMPTS[4:10]:
            model.generate(prompt, 12, ignore_eos=True)
        stats = model.stats
        counts.append((stats.accepted, stats.drafted, stats.emitted_tokens, stats.request_steps))
        assert 0 < stats.host_gap_s < stats.decode_s + stats.prefill_s
        assert stats.replay_s < stats.decode_s + stats.prefill_s
    assert counts[0] == counts[1]


def test_a_replay_that_fails(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not read is computed again, with what failed; each token is handed out once."""
    engine, plain = session.spec.engine, session.plain
    real, calls = engine.program.run, []

    def fails(key: Any) -> Any:
        calls.append(key)
        result = real(key)
        if len(calls) in (3, 6, 7):
            raise RuntimeError("no such device")
        return result

    monkeypatch.setattr(engine.program, "run", fails)
    ids = [engine.add(prompt, 11) for prompt in PROMPTS[5:9]]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    failures = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            failures += 1
            assert not engine.running
            continue
        for output in outputs:
            found[output.request_id] += output.token_ids
    assert failures == 3
    assert list(found.values()) == [plain.generate(p, 11, stop=False) for p in PROMPTS[5:9]]
    session.check_empty()


def test_a_read_that_fails(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was launched behind it: pages known of what was only launched are not."""
    engine, plain = session.spec.engine, session.plain
    real, calls = Readout.read, []

    def fails(self: Readout) -> Any:
        calls.append(self)
        if len(calls) in (3, 4, 8):
            for name, pool in engine.program.shared.items():
                if name.startswith("kv."):
                    pool.fill_(math.nan)  # What the device had not got to.
            raise RuntimeError("lost")
        return real(self)

    monkeypatch.setattr(Readout, "read", fails)
    for prompt in PROMPTS[16:20]:
        request_id = engine.add(prompt, 1)
        found: list[int] = []
        while engine.has_work:
            try:
                outputs = engine.step()
            except RuntimeError:
                assert engine.stats.pages_idle == 0
                continue
            assert {output.request_id for output in outputs} <= {request_id}
            found += [token for output in outputs for token in output.token_ids]
        assert found == plain.generate(prompt, 1, stop=False)
    assert len(calls) > 8
    monkeypatch.undo()
    session.check_empty()


class LateDevice:
    """Does what a device's stream does: nothing at once, all in order when somebody waits.

    Writes and replays of a program are put off; a step's results are taken where its replay is.
    """

    def __init__(self, program: Program, monkeypatch: pytest.MonkeyPatch):
        self.queue: list[Callable[[], None]] = []
        write, replay = program.write, program.run
        device = self

        def write_later(tensor: Tensor, value: Tensor | int) -> None:
            kept = value.clone() if isinstance(value, Tensor) else value
            device.queue.append(lambda: write(tensor, kept))

        class LateReadout:
            def __init__(self, program: Program, key: StepKey):
                self.begin = self.end = Moment()
                self.replay_s, self.results = 1e-3, dict[str, Tensor]()
                device.queue.append(self._replay)
                self._key = key

            def _replay(self) -> None:
                buffers = replay(self._key)
                names = program.steps[self._key].layout.results
                self.results = {name: buffers[name].clone() for name in names}

            def read(self) -> dict[str, Tensor]:
                while not self.results:
                    device.queue.pop(0)()
                return self.results

        monkeypatch.setattr(program, "write", write_later)
        monkeypatch.setattr(runner_module, "Readout", LateReadout)


@pytest.mark.parametrize("which", ["greedy", "sampled"])
def test_the_host_reads_nothing_but_results(
    which: str,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[[str], SamplingOracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that is always late texts are the same: all that the host needs is in them."""
    spec = read_late(compiled("mimo", 2, **(MASKABLE if which == "sampled" else PRESSED)))
    params = FILTERS["everything" if which == "sampled" else "greedy"]
    plain = sampling_oracle("mimo")
    device, stops = LateDevice(spec.program, monkeypatch), tuple(plain.oracle.stop_ids)
    expected = {}
    for prompt in PROMPTS[4:14]:
        request_id = spec.engine.add(prompt, 12, stops, params)
        expected[request_id] = plain.generate(prompt, 12, params)
    waited = []
    found: dict[int, list[int]] = {}
    while spec.engine.has_work:
        for output in spec.engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        waited.append(len(device.queue))
    assert found == expected
    assert sum(map(bool, waited)) > len(waited) / 2, "work was left on the device"
    while device.queue:
        device.queue.pop(0)()
    Session(spec, oracle("mimo")).check_empty()


def test_aborts_of_what_is_unread(session: Session) -> None:
    """Nothing of an aborted request is handed out; its slot and pages serve the next at once."""
    engine, plain = session.spec.engine, session.plain
    for steps in range(1, 5):
        gone = engine.add(PROMPTS[12], 12)
        seen = [output for _ in range(steps) for output in engine.step()]
        assert sum(len(output.token_ids) for output in seen) < 12
        engine.abort(gone)
        assert not engine.has_work
        assert engine.step() == []
        session.check_empty()
        stays, gone = engine.add(PROMPTS[6], 12), engine.add(PROMPTS[13], 12)
        found = [output for _ in range(steps) for output in engine.step()]
        engine.abort(gone)
        text = [i for output in found if output.request_id == stays for i in output.token_ids]
        rest = run(session.spec)
        assert gone not in rest
        text += rest[stays][0] if stays in rest else []
        assert text == plain.generate(PROMPTS[6], 12, stop=False)
        session.check_empty()


@pytest.mark.parametrize("spec_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sampling_and_grammars(
    spec_tokens: int,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
    sampling_oracle: Callable[[str], SamplingOracle],
) -> None:
    """Penalties count in the graph; a grammar's masks wait until it was told what came before."""
    session = Session(read_late(compiled("mimo", spec_tokens, **MASKED)), oracle("mimo"))
    engine, plain = session.spec.engine, sampling_oracle("mimo")
    expected = {}
    for index, (name, params) in enumerate(FILTERS.items()):
        prompt = PROMPTS[index % len(PROMPTS)]
        grammar = Records() if name in ("greedy", "temperature") else None
        request_id = engine.add(prompt, NEW, (STOP,), params, grammar=grammar)
        expected[request_id] = (
            wanted(plain, prompt, params) if grammar else plain.generate(prompt, NEW, params)
        )
    assert len(expected) > 5
    found = run(session.spec)
    assert {request_id: text for request_id, (text, *_) in found.items()} == expected
    assert session.spec.stats.forced_drafts > 0
    session.check_empty()


def test_generate_stream_and_options(session: Session) -> None:
    spec, plain = session.spec, session.plain
    prompts = PROMPTS[3:8]
    texts = [plain.generate(prompt, 10, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 10, ignore_eos=True) == texts
    iterator = spec.stream(prompts, 10, ignore_eos=True)
    first = next(iterator)
    assert first.token_ids == texts[first.index][: len(first.token_ids)]
    iterator.close()
    session.check_empty()
    with pytest.raises(RequestError, match="prompt is empty"):
        spec.generate([[]], 3)
    with pytest.raises(OptionError, match="async_scheduling is 1; expected True, False or None"):
        changed(spec.options, async_scheduling=1)


def test_moments_are_of_the_buffers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device may be another: an event there would not wait for the copies."""
    recorded: list[Any] = []
    event = SimpleNamespace(record=recorded.append, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")

    key, layout = StepKey.decode(1, 0), Layout(batch_specs(StepKey.decode(1, 0)), {})
    assert len(layout.results) == 4
    buffers = dict.fromkeys(layout.results, SimpleNamespace(device=torch.device("cuda:1")))
    copies = SimpleNamespace(take=lambda: dict.fromkeys(buffers))
    steps = {key: SimpleNamespace(buffers=buffers, layout=layout, results=copies)}
    program: Any = SimpleNamespace(steps=steps, run=lambda key: buffers, wait=lambda wait: wait())
    readout = Readout(program, key)
    assert recorded == ["stream of cuda:1"] * 3
    assert isinstance(readout.begin, DeviceMoment)
    assert readout.read().keys() == set(layout.results)


@pytest.mark.parametrize(
    ("family", "backend", "more", "found"),
    [
        ("mimo", "cuda", {}, True),
        ("mimo", "cpu", {}, False),
        ("mimo", "cuda", {"async_scheduling": False}, False),
        ("mimo", "cpu", {"async_scheduling": True}, True),
        ("mimo", "cuda", {"kv_offload_dir": "."}, False),
        ("mimo", "cuda", {"tensor_parallel_size": 2}, False),
        ("qwen3_next", "cuda", {}, False),
        ("qwen3_next", "cuda", {"snapshot_bytes": 0}, True),
        ("qwen3_next", "cuda", {"prefix_caching": False}, True),
    ],
)
def test_it_is_the_default_on_a_gpu_where_nothing_is_lost(
    family: str,
    backend: str,
    more: dict[str, Any],
    found: bool,
    checkpoint: Callable[..., Path],
) -> None:
    """A recurrent state is reused by snapshots, which requests that decode would leave no more."""
    loaded = load(checkpoint(family), "float32", True)
    plan = of_backend(backend, spec_tokens=1, batch_buckets=(2,), max_len=64, **more)
    assert plan.async_scheduling is more.get("async_scheduling", False), "as nobody has counted"
    assert scheduled(StepCompiler(loaded, plan, EagerBackend())).async_scheduling is found
