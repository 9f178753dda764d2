"""What happens to requests: callbacks, streams, failing steps, leaks, reuse, and the statistics."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.plans import changed
from helpers.schedules import PRESSED, Session
from helpers.theorem import PROMPTS, poison

import mtpc
from mtpc.engine.engine import Engine
from mtpc.engine.request import StepOutput
from mtpc.errors import GraphError, OptionError, RequestError
from mtpc.layout import BufferSpec
from mtpc.layout.slot_state import slot_state


@pytest.fixture
def session(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> Session:
    made = Session(compiled("mimo", 2, **PRESSED), oracle("mimo"))
    poison(made.spec)
    return made


@pytest.fixture
def spec(session: Session) -> mtpc.SpecModel:
    return session.spec


def run(engine: Engine) -> dict[int, list[int]]:
    """Step to the end; tokens by request."""
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_drafts_after_reuse_and_preemption(session: Session) -> None:
    """Both happen, to requests that share a prefix; text and drafts are as if neither had."""
    spec, plain = session.spec, session.plain
    before = (spec.stats.preemptions, spec.stats.reused_tokens)
    prompts = [[*PROMPTS[12][:16], *tail] for tail in ((5,), (5, 6), (7, 8, 9))]
    ids = [spec.engine.add(prompt, 20) for prompt in prompts]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while spec.engine.has_work:
        for output in spec.engine.step():
            found[output.request_id] += output.token_ids
        session.check_drafts()
    assert list(found.values()) == [plain.generate(p, 20, stop=False) for p in prompts]
    assert spec.stats.preemptions > before[0]
    assert spec.stats.reused_tokens > before[1] + 16
    assert session.seen["drafts compared"] > 20
    session.check_empty()


def test_output_is_reused_too(spec: mtpc.SpecModel) -> None:
    """A conversation's next turn finds the pages of the last one's answer."""
    answer = spec.generate(PROMPTS[8], 12, ignore_eos=True)
    before = spec.stats.reused_tokens
    turn = [*PROMPTS[8], *answer, 5, 6, 7, 8]
    again = spec.generate(turn, 4, ignore_eos=True)
    # 11 + 12 tokens; the last two of them have no two tokens behind them that are final.
    assert spec.stats.reused_tokens - before == (len(turn) - 4 - 2) // 4 * 4 == 20
    spec.engine.reset_prefix_cache()
    assert spec.generate(turn, 4, ignore_eos=True) == again
    assert spec.stats.reused_tokens - before == 20


def test_no_reuse_where_not_asked_for(spec: mtpc.SpecModel) -> None:
    options = changed(spec.options, prefix_caching=False)
    spec = mtpc.SpecModel(spec.served, options, spec.program, spec.loaded)
    assert spec.generate(PROMPTS[12], 4) == spec.generate(PROMPTS[12], 4)
    assert spec.stats.reused_tokens == spec.stats.pages_idle == 0
    with pytest.raises(OptionError, match="prefix_caching is 1; expected True or False"):
        mtpc.CompileOptions(prefix_caching=1)


@pytest.mark.parametrize("name", ["kv.1.ring_k", "kv.1.conv", "kv.1.k", "state.hidden"])
def test_state_that_is_not_in_pages_is_copied(name: str, spec: mtpc.SpecModel) -> None:
    """Any buffer with rows by request slot belongs to snapshots; without their memory, no reuse."""
    layout, slots = spec.program.layout, spec.program.max_reqs
    assert slot_state(layout) == ()

    def engine_of(rows: int, **options: Any) -> Engine:
        extended = layout.extended([BufferSpec(name, (rows, 64), torch.float64)])
        steps = {key: replace(step, layout=extended) for key, step in spec.program.steps.items()}
        shared = {**spec.program.shared, name: extended.allocate(name)}
        program = type(spec.program)(steps, shared)
        return Engine(program, changed(spec.options, **options), 96)

    engine = engine_of(1 + 2 * slots, snapshot_bytes=3 * 2 * 64 * 8)
    engine.add(PROMPTS[12], 3)
    run(engine)
    assert engine.stats.num_snapshots == 3
    assert 0 < engine.stats.snapshots_used <= 3
    assert engine.stats.snapshot_bytes == engine.stats.snapshots_used * 1024
    assert f"{engine.stats.snapshots_used} of 3 used" in str(engine.stats)
    assert f"mtpc:state_snapshots {engine.stats.snapshots_used}.0" in engine.stats.prometheus()
    engine = engine_of(1 + slots, snapshot_bytes=511)
    assert engine.scheduler.prefixes is None
    assert any("one snapshot takes 512" in reason for reason in engine.stats.fallbacks)
    engine.add(PROMPTS[12], 3)
    run(engine)
    assert engine.stats.pages_idle == 0
    with pytest.raises(GraphError, match=f"{name} has {2 + slots} rows for {1 + slots} request"):
        engine_of(2 + slots)


def test_a_callback_that_raises_harms_nobody_else(session: Session) -> None:
    """Its own request ends with `error` and what was raised; all its pages come back."""
    engine, plain = session.spec.engine, session.plain
    good: list[StepOutput] = []

    def bad(output: StepOutput) -> None:
        if good:
            raise ValueError("the consumer is broken")

    first = engine.add(PROMPTS[5], 12, on_output=good.append)
    broken = engine.add(PROMPTS[3], 12, on_output=bad)
    second = engine.add(PROMPTS[6], 12)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    tokens = [t for o in good for t in o.token_ids]
    assert tokens == plain.generate(PROMPTS[5], 12, stop=False)
    assert {o.request_id for o in good} == {first}
    by_hand = [t for o in outputs if o.request_id == second for t in o.token_ids]
    assert by_hand == plain.generate(PROMPTS[6], 12, stop=False)
    (failed,) = [o for o in outputs if o.request_id == broken and o.finish_reason]
    assert failed.finish_reason == "error"
    assert str(failed.error) == "the consumer is broken"
    assert engine.stats.callback_errors == 1
    session.check_empty()
    with pytest.raises(RequestError, match="on_output is 5; expected a callable"):
        engine.add([3], 3, on_output=5)


def test_a_callback_that_raises_when_aborted_harms_nobody(session: Session) -> None:
    """`abort` ends the request all the same, and whoever aborted it is not told of the error."""
    engine, plain = session.spec.engine, session.plain
    before, errors = engine.stats.finished["aborted"], engine.stats.callback_errors

    def bad(output: StepOutput) -> None:
        raise ValueError("the consumer is broken")

    broken = engine.add(PROMPTS[3], 12, on_output=bad)
    other = engine.add(PROMPTS[6], 12)
    engine.abort(broken)
    assert engine.stats.callback_errors == errors + 1
    assert engine.stats.finished["aborted"] == before + 1
    assert run(engine)[other] == plain.generate(PROMPTS[6], 12, stop=False)
    session.check_empty()


def test_abort_from_a_callback(session: Session) -> None:
    """A consumer that has enough, of its own request and of another one."""
    engine = session.spec.engine
    told: dict[str, list[StepOutput]] = {"own": [], "other": []}
    ids: dict[str, int] = {}

    def own(output: StepOutput) -> None:
        told["own"].append(output)
        if len(told["own"]) == 3:
            engine.abort(ids["other"])
            engine.abort(ids["own"], "stop")

    ids["own"] = engine.add(PROMPTS[5], 30, on_output=own)
    ids["other"] = engine.add(PROMPTS[3], 30, on_output=told["other"].append)
    third = engine.add(PROMPTS[6], 8)
    assert run(engine)[third] == session.plain.generate(PROMPTS[6], 8, stop=False)
    assert [o.finish_reason for o in told["own"]] == [None, None, None, "stop"]
    assert told["other"][-1].finish_reason == "aborted"
    assert all(o.finish_reason is None for o in told["other"][:-1])
    session.check_empty()


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails_is_done_again(
    session: Session, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the device did its work: no token is lost or doubled."""
    program, calls = session.spec.program, iter(range(1000))
    real = program.run

    def breaks(key: Any) -> Any:
        fails = next(calls) == at
        if fails and not after:
            raise RuntimeError("interrupted")
        buffers = real(key)
        if fails:
            raise RuntimeError("interrupted")
        return buffers

    monkeypatch.setattr(program, "run", breaks)
    engine = session.spec.engine
    ids = [engine.add(prompt, 10) for prompt in PROMPTS[7:10]]
    found: dict[int, list[int]] = {i: [] for i in ids}
    failed = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            failed += 1
            continue
        for output in outputs:
            found[output.request_id] += output.token_ids
        session.check_drafts()
    assert failed == 1
    wanted = [session.plain.generate(p, 10, stop=False) for p in PROMPTS[7:10]]
    assert [found[i] for i in ids] == wanted
    session.check_empty()


def test_streams_beside_each_other(session: Session) -> None:
    """Two half-read streams and `generate` share the engine; closing one aborts what it had."""
    spec, plain = session.spec, session.plain
    one = spec.stream(PROMPTS[4:6], 12, ignore_eos=True)
    assert not spec.engine.has_work, "queued when the first output is asked for"
    two = spec.stream(PROMPTS[6], 12, ignore_eos=True)
    found = next(one).token_ids + next(two).token_ids
    assert len(found) == 2
    assert spec.generate(PROMPTS[7], 5, ignore_eos=True) == plain.generate(PROMPTS[7], 5, False)
    two.close()
    rest: dict[int, list[int]] = {0: [], 1: []}
    for output in one:
        assert output.text is None
        rest[output.index] += output.token_ids
    wanted = [plain.generate(p, 12, stop=False) for p in PROMPTS[4:6]]
    assert [found[:1] + rest[0], rest[1]] == wanted or [rest[0], found[:1] + rest[1]] == wanted
    session.check_empty()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (None, {}, "prompts is None"),
        ([[]], {}, "prompt is empty"),
        ([[3], [96]], {}, "prompt id 96"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([3], {"stop_ids": range(9)}, "9 stop ids"),
        ([3], {"stop": "a"}, "need text prompts"),
        ("text", {"stop": ["a", ""]}, "empty string"),
        ("text", {}, "no tokenizer"),
    ],
)
def test_a_stream_refuses_at_once(
    spec: mtpc.SpecModel, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        spec.stream(prompts, **{"max_new_tokens": 8, **options})
    assert not spec.engine.has_work


def check_no_leak(session: Session, count: int) -> None:
    """Random requests, a third of them aborted at random moments."""
    engine, chance = session.spec.engine, random.Random(count)
    live: list[int] = []
    for _ in range(count):
        live.append(engine.add(chance.choice(PROMPTS), chance.randint(1, 6)))
        if chance.random() < 0.35:
            engine.abort(live.pop(chance.randrange(len(live))))
        while len(engine.waiting) > 4:
            engine.step()
    run(engine)
    session.check_empty()
    assert len(engine.pages.index.pages) == engine.stats.pages_idle <= engine.pages.count
    engine.reset_prefix_cache()
    assert engine.stats.pages_idle == engine.stats.pages_used == 0


def test_nothing_leaks(session: Session) -> None:
    check_no_leak(session, 150)


@pytest.mark.slow
def test_nothing_leaks_at_length(session: Session) -> None:
    check_no_leak(session, 10_000)


def test_statistics(compiled: Callable[..., Any]) -> None:
    """Counts add up, and Prometheus' text says the same."""
    spec = compiled("mimo", 3, num_pages=30, batch_buckets=(2,), prefill_chunk=4)
    spec.engine.reset_prefix_cache()
    out = spec.generate([PROMPTS[12], PROMPTS[12], PROMPTS[3]], 9, ignore_eos=True)
    held = spec.engine.add(PROMPTS[12], 8)
    spec.engine.add(PROMPTS[12], 8)
    spec.engine.add(PROMPTS[12], 8)
    spec.engine.step()
    stats = spec.stats
    assert stats.emitted_tokens == sum(map(len, out)) == 27
    assert stats.finished == {"length": 3}
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    # Of 21 tokens, 16 have three behind them; the second of two equal prompts waits for them.
    computed = stats.prompt_tokens + stats.reused_tokens - 2 * 21 - len(PROMPTS[3])
    assert stats.reused_tokens == 3 * 16
    assert computed == 2 * 16 + 4
    assert stats.pages_used == len({p for r in spec.engine.running for p in r.pages}) > 0
    assert stats.replay_s > 0
    assert stats.host_gaps > 3
    assert 0 < stats.host_gap_share < 1
    assert stats.host_gap_s < stats.decode_s + stats.prefill_s
    samples = dict(
        line.rsplit(" ", 1) for line in stats.prometheus().splitlines() if line[0] != "#"
    )
    assert float(samples["mtpc:generation_tokens_total"]) == 27
    assert float(samples["mtpc:num_requests_running"]) == 2
    assert float(samples["mtpc:kv_cache_usage_perc"]) == stats.pages_used / 29
    assert float(samples["mtpc:prefix_cache_hits_total"]) == 48
    assert float(samples["mtpc:spec_decode_num_drafts_total"]) == stats.request_steps
    assert float(samples["mtpc:spec_decode_num_accepted_tokens_total"]) == sum(stats.accepted)
    position = 'mtpc:spec_decode_num_accepted_tokens_per_pos_total{position="1"}'
    assert float(samples[position]) == stats.accepted[1]
    assert float(samples['mtpc:replays_total{step="decode[R=2,Q=4,K=3]"}']) > 0
    for line in stats.prometheus().splitlines():
        pattern = r'# (HELP|TYPE) mtpc:\w+ .+|mtpc:\w+(\{(\w+="[^"]*",?)+\})? [\d.e+-]+'
        assert re.fullmatch(pattern, line), line
    from rich.console import Console

    console = Console(record=True, width=200, file=io.StringIO())
    console.print(stats)
    assert "host gap" in console.export_text()
    assert "1 preemptions" not in str(stats)
    spec.engine.abort(held)
    while spec.engine.has_work:
        spec.engine.step()
