"""The engine under asyncio: cancellation anywhere, slow consumers, errors, and a clean end."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.places import ROOT
from helpers.plans import changed
from helpers.schedules import MASKABLE
from helpers.theorem import PROMPTS, poison

import mtpc
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.text import TextAssembler
from mtpc.errors import CapacityError, OptionError, RequestError, ServingError


@pytest.fixture
def spec(compiled: Callable[..., Any]) -> mtpc.SpecModel:
    made = compiled("mimo", 2, num_pages=20, batch_buckets=(1, 3))
    poison(made)
    return made


def serving(spec: mtpc.SpecModel, **changes: Any) -> AsyncEngine:
    return AsyncEngine(spec, **changes)


def serving_in_turn(
    spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncEngine:
    """One that waits for its consumers after each step: who is late finds requests running."""
    monkeypatch.setattr("mtpc.engine.async_engine.MAX_TURN_S", 10)
    engine = serving(spec, **changes)
    engine._turns = 10**6
    return engine


async def collect(engine: AsyncEngine, prompt: list[int], new: int) -> list[int]:
    ids: list[int] = []
    async for output in engine.generate(prompt, new, stop_ids=()):
        ids += output.token_ids
    return ids


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the engine's thread to get there."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the engine did not get there in 10 s")


def is_empty(spec: mtpc.SpecModel) -> bool:
    engine = spec.engine
    return (
        not engine.has_work
        and engine.pages.num_free == engine.pages.count
        and engine.slots.num_free == engine.slots.count
    )


def test_many_at_once(spec: mtpc.SpecModel, oracle: Callable[..., Any]) -> None:
    """More than slots, pages and places; each as decoded alone."""

    async def main() -> list[list[int]]:
        async with serving(spec, max_requests=5) as engine:
            return await asyncio.gather(*(collect(engine, p, 10) for p in PROMPTS))

    found = asyncio.run(main())
    assert found == [oracle("mimo").generate(p, 10, stop=False) for p in PROMPTS]
    assert is_empty(spec)


def test_cancelled_at_every_await(
    spec: mtpc.SpecModel, oracle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a place, for the first output, for a later one; all come back, none is harmed."""
    wanted = oracle("mimo").generate(PROMPTS[5], 30, stop=False)

    async def reach(engine: AsyncEngine, outputs: int, reached: asyncio.Event) -> None:
        async for _ in engine.generate(PROMPTS[8], 40, stop_ids=()):
            outputs -= 1
            if outputs <= 0:
                reached.set()

    async def main() -> None:
        async with serving_in_turn(spec, monkeypatch, max_requests=2) as engine:
            for outputs in range(6):
                neighbour = asyncio.create_task(collect(engine, PROMPTS[5], 30))
                reached = asyncio.Event()
                victim = asyncio.create_task(reach(engine, outputs, reached))
                blocked = asyncio.create_task(collect(engine, PROMPTS[3], 3))
                if outputs:
                    await reached.wait()
                else:
                    await asyncio.sleep(0)
                blocked.cancel()
                victim.cancel()
                done = await asyncio.gather(victim, blocked, return_exceptions=True)
                assert all(isinstance(error, asyncio.CancelledError) for error in done)
                assert await neighbour == wanted
                await until(lambda: is_empty(spec))

    asyncio.run(main())


def test_leaving_the_loop_aborts(spec: mtpc.SpecModel) -> None:
    async def main() -> None:
        async with serving(spec) as engine:
            outputs = engine.generate(PROMPTS[8], 40, stop_ids=())
            assert (await anext(outputs)).token_ids
            await outputs.aclose()
            await until(lambda: is_empty(spec))

    asyncio.run(main())
    assert spec.stats.finished["aborted"]


def test_a_consumer_that_never_reads(
    spec: mtpc.SpecModel, oracle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request runs to its end and frees all; what it missed is one output."""
    plain = oracle("mimo")

    async def main() -> None:
        async with serving_in_turn(spec, monkeypatch) as engine:
            idle = engine.generate(PROMPTS[4], 30, stop_ids=())
            first = await anext(idle)
            assert await collect(engine, PROMPTS[6], 20) == plain.generate(
                PROMPTS[6], 20, stop=False
            )
            await until(lambda: is_empty(spec))
            await engine.call(lambda: None)  # The step that freed all has told its outputs, too.
            rest = [output async for output in idle]
            assert len(rest) == 1, "one mailbox, one output"
            assert first.token_ids + rest[0].token_ids == plain.generate(PROMPTS[4], 30, stop=False)

    asyncio.run(main())


def test_consumers_get_their_turn(
    spec: mtpc.SpecModel, oracle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where consumers are late, the next step waits until all have taken what the last brought."""
    monkeypatch.setattr("mtpc.engine.async_engine.MAX_TURN_S", 10)
    real, taken, gaps, turns = spec.program.run, [0], list[int](), list[int]()
    before = spec.stats.emitted_tokens

    async def main() -> list[list[int]]:
        async with serving(spec) as engine:

            def run(key: Any) -> Any:
                gaps.append(spec.engine._stats.emitted_tokens - before - taken[0])
                turns.append(engine._turns)
                return real(key)

            async def counted(prompt: list[int]) -> list[int]:
                ids: list[int] = []
                async for output in engine.generate(prompt, 30, stop_ids=()):
                    ids += output.token_ids
                    taken[0] += len(output.token_ids)
                return ids

            monkeypatch.setattr(spec.program, "run", run)
            engine._is_taken.clear()  # As after a replay that let nobody run.
            return await asyncio.gather(*(counted(p) for p in PROMPTS[3:6]))

    found = asyncio.run(main())
    assert found == [oracle("mimo").generate(p, 30, stop=False) for p in PROMPTS[3:6]]
    waited = [gap for gap, left in zip(gaps, turns, strict=True) if left]
    assert len(waited) > 10
    assert set(waited) == {0}
    assert turns[-1] < max(turns), "it looks again after a while"


def test_places_are_bounded(spec: mtpc.SpecModel) -> None:
    """No more than max_requests are in the engine, whoever asks."""
    most = 0

    def count() -> int:
        return len(spec.engine.waiting) + len(spec.engine.running)

    async def main() -> None:
        nonlocal most
        async with serving(spec, max_requests=2) as engine:
            tasks = [asyncio.create_task(collect(engine, p, 6)) for p in PROMPTS[:8]]
            while not all(task.done() for task in tasks):
                # Between two steps: within one a request may be in both for a moment.
                most = max(most, await engine.call(count))
                await asyncio.sleep(0.002)
            assert all(len(task.result()) == 6 for task in tasks)

    asyncio.run(main())
    assert 1 <= most <= 2


def test_an_engine_error_reaches_each_consumer_once(
    spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))
    real = spec.program.run

    def breaks(key: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("the device fell off")
        return real(key)

    monkeypatch.setattr(spec.program, "run", breaks)

    async def main() -> None:
        async with serving(spec, max_requests=2) as engine:
            ended = await asyncio.gather(
                *(collect(engine, p, 30) for p in PROMPTS[3:7]), return_exceptions=True
            )
            assert all(isinstance(error, ServingError) for error in ended)
            assert "the device fell off" in str(ended[0])
            assert isinstance(ended[0].__cause__, RuntimeError)
            with pytest.raises(ServingError, match="has ended"):
                await collect(engine, PROMPTS[3], 3)

    asyncio.run(main())
    monkeypatch.undo()
    assert is_empty(spec)
    assert len(spec.generate(PROMPTS[3], 4, ignore_eos=True)) == 4


def test_closing_tells_those_who_wait(
    spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends the thread; closing twice, or what never ran, does nothing."""

    async def main() -> threading.Thread:
        engine = serving(spec)
        with pytest.raises(ServingError, match="not running"):
            await collect(engine, PROMPTS[3], 3)
        await engine.aclose()
        engine = serving_in_turn(spec, monkeypatch)
        engine.start()
        task = asyncio.create_task(collect(engine, PROMPTS[3], 55))
        await until(lambda: spec.engine.has_work)
        await asyncio.gather(engine.aclose(), engine.aclose())
        with pytest.raises(ServingError, match="was closed"):
            await task
        with pytest.raises(ServingError, match="has ended"):
            await collect(engine, PROMPTS[3], 3)
        return engine._thread

    thread = asyncio.run(main())
    thread.join(5)
    assert not thread.is_alive()
    assert is_empty(spec)


def test_a_system_without_threads(spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told, and the engine can be closed, or started later."""

    async def main() -> None:
        engine = serving(spec)
        with monkeypatch.context() as without:
            starts = {"_start_new_thread", "_start_joinable_thread"} & vars(threading).keys()
            for name in starts:  # Python 3.13 has the second one.
                without.setattr(threading, name, _no_thread)
            with pytest.raises(ServingError, match="free threads"):
                engine.start()
        engine.start()
        await collect(engine, PROMPTS[3], 3)
        await asyncio.wait_for(engine.aclose(), 30)

    asyncio.run(main())


def _no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_commands_that_fail(spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that were made together with one that fails get their answers, and the end comes;
    so it does where the last commands fail."""

    def breaks(*_: object) -> None:
        raise RuntimeError("no room in the queue")

    async def main() -> None:
        engine = serving(spec)
        monkeypatch.setattr(spec.engine, "submit", breaks)
        monkeypatch.setattr(spec.engine, "abort", breaks)
        task = asyncio.create_task(collect(engine, PROMPTS[3], 30))
        calls = [asyncio.create_task(engine.call(lambda i=i: i)) for i in range(3)]
        with engine._wake:  # All are there before the thread takes the first.
            engine.start()
            await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.gather(*calls), 10) == [0, 1, 2]
        with pytest.raises(ServingError, match="no room in the queue"):
            await asyncio.wait_for(task, 10)
        await asyncio.wait_for(engine.aclose(), 10)
        assert isinstance(engine._ended.result(), RuntimeError)

    asyncio.run(main())
    monkeypatch.undo()
    assert is_empty(spec)


def test_bad_requests_are_refused_at_once(spec: mtpc.SpecModel) -> None:
    """One clear error each; the others go on."""

    async def main() -> None:
        async with serving(spec) as engine:
            good = asyncio.create_task(collect(engine, PROMPTS[5], 20))
            for prompt, new, error, message in (
                ([], 3, RequestError, "prompt is empty"),
                ([3, 99], 3, RequestError, "prompt id 99"),
                ([3], 0, RequestError, "max_new_tokens is 0"),
                ("text", 3, RequestError, "no tokenizer"),
            ):
                with pytest.raises(error, match=message):
                    await collect(engine, prompt, new)
            with pytest.raises(RequestError, match="stop strings need a text prompt"):
                await anext(engine.generate([3], 3, stop="a"))
            text = TextAssembler(spec.served.decode)
            with pytest.raises(RequestError, match="text is for prompts of token ids"):
                await anext(engine.generate("a", 3, text=text))
            assert len(await good) == 20

    asyncio.run(main())
    for odd in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match="max_requests is"):
            serving(spec, max_requests=odd)


def test_longer_than_the_pool(spec: mtpc.SpecModel) -> None:
    options = changed(spec.options, num_pages=6)
    spec = mtpc.SpecModel(spec.served, options, spec.program, spec.loaded)

    async def main() -> None:
        async with serving(spec) as engine:
            good = asyncio.create_task(collect(engine, [3] * 8, 4))
            with pytest.raises(CapacityError, match="needs 8 pages of 4 tokens, the pool has 5"):
                await collect(engine, [3] * 20, 6)
            assert len(await good) == 4

    asyncio.run(main())


def test_generate_beside_it(spec: mtpc.SpecModel, oracle: Callable[..., Any]) -> None:
    """Another thread's `generate` on the same engine gets its turn, and its own tokens."""
    plain = oracle("mimo")

    async def main() -> None:
        async with serving(spec) as engine:
            task = asyncio.create_task(collect(engine, PROMPTS[5], 40))
            start = time.monotonic()
            found = await asyncio.to_thread(spec.generate, PROMPTS[4:7], 8, ignore_eos=True)
            assert time.monotonic() - start < 60
            assert found == [plain.generate(p, 8, stop=False) for p in PROMPTS[4:7]]
            assert await task == plain.generate(PROMPTS[5], 40, stop=False)

    asyncio.run(main())


def test_the_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/engine.md's asyncio example runs as it stands there, on the eager backend."""
    page = (ROOT / "docs" / "engine.md").read_text()
    (example,) = re.findall(r"```python\n(import asyncio\n.*?)```", page, re.DOTALL)
    buckets = "batch_buckets=(1, 4),"
    assert example.count(buckets) == 1
    exec(example.replace(buckets, 'batch_buckets=(4,), backend="eager",'), {})
    assert len(capsys.readouterr().out) > 40


def test_sampling(compiled: Callable[..., Any]) -> None:
    """Parameters reach the request; log-probabilities come back, one per token."""
    made = compiled("mimo", 2, **MASKABLE)
    params = mtpc.SamplingParams(temperature=0.9, seed=5, logprobs=1)
    expected = made.generate(PROMPTS[4], 12, ignore_eos=True, sampling=params)

    async def main() -> tuple[list[int], list[Any]]:
        ids, logprobs = [], []
        async with serving(made) as engine:
            async for output in engine.generate(PROMPTS[4], 12, stop_ids=(), sampling=params):
                ids += output.token_ids
                logprobs += output.logprobs or []
        return ids, logprobs

    ids, logprobs = asyncio.run(main())
    assert ids == expected
    assert [entry.token_id for entry in logprobs] == ids
