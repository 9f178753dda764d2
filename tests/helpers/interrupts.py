"""Child processes with KeyboardInterrupt at random moments of the engine's calls.

    python -m helpers.interrupts lock COUNT
    python -m helpers.interrupts engine COUNT CHECKPOINT
    python -m helpers.interrupts build COUNT CHECKPOINT CACHE

A child prints `done` at its end. If a lock is left taken, it hangs instead.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpc.engine.async_engine import AsyncEngine

CHANCE = random.Random(7)


class Interrupter:
    """Raises KeyboardInterrupt once or twice at a random moment of a call.

    Args:
        sends_sigint: whether to send SIGINT, as Ctrl-C does, which the tested code may handle.

    Attributes:
        hits: interrupts so far.
    """

    def __init__(self, sends_sigint: bool = False) -> None:
        self._sends_sigint = sends_sigint
        self.hits = self._left = 0
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, *unused: object) -> None:
        if self._left:
            self._left -= 1
            self.hits += 1
            if self._left:  # The second one comes while the first one is handled.
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * CHANCE.randint(1, 200))
            if not self._sends_sigint:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    def during(self, seconds: float, action: Callable[[], object]) -> None:
        """Run the action, and interrupt it after up to this many seconds."""
        self._left = CHANCE.choice((1, 1, 2))
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds * CHANCE.random()))
                action()
            finally:
                self._left = 0
        except KeyboardInterrupt:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)


def lock(count: int) -> None:
    """`with lock` in a loop; another thread must get the lock in between."""
    from mtpc.engine.lock import FairLock

    sys.setswitchinterval(1e-4)
    made, interrupter = FairLock(), Interrupter()
    stop, got = threading.Event(), [0]

    def enter() -> None:
        with made.in_turn():
            made.arrived()
            got[0] += 1

    def other() -> None:
        while not stop.is_set():
            enter()

    def loop() -> None:
        while True:
            enter()

    thread = threading.Thread(target=other)
    thread.start()
    while interrupter.hits < count:
        interrupter.during(2e-4, loop)
        before = got[0]
        while got[0] == before:  # For ever, if the interrupt has left the lock taken.
            time.sleep(0)
    stop.set()
    thread.join()


def engine(count: int, checkpoint: Path) -> None:
    """Interrupt calls of the engine, while another thread's texts must not change."""
    import torch

    import mtpc
    from helpers.families import TINY
    from mtpc.engine.async_engine import AsyncEngine
    from mtpc.errors import ServingError

    torch.set_num_threads(1)
    options: dict[str, Any] = {"backend": "eager", "dtype": "float64", **TINY}
    spec = mtpc.compile(checkpoint, spec_tokens=2, num_pages=14, batch_buckets=(1, 3), **options)
    prompts = [[5 + i, 7, 9 + i, 11][: 2 + i % 3] for i in range(6)]
    wanted = {tuple(p): spec.generate(p, 8, ignore_eos=True) for p in prompts}
    start = time.perf_counter()
    spec.generate(prompts[0], 8, ignore_eos=True)
    seconds = time.perf_counter() - start
    interrupter, stop, faults, texts = Interrupter(), threading.Event(), list[str](), [0]

    def check(prompt: list[int]) -> None:
        found = spec.generate(prompt, 8, ignore_eos=True)
        if found != wanted[tuple(prompt)]:
            faults.append(f"{prompt}: {found}")
        texts[0] += 1

    def other() -> None:
        while not stop.is_set():
            try:
                check(CHANCE.choice(prompts))
            except ServingError as error:
                if not isinstance(error.__cause__, KeyboardInterrupt):
                    faults.append(repr(error))
            except Exception as error:
                faults.append(repr(error))

    def stream() -> None:
        for number, _ in enumerate(spec.stream(prompts[:3], 8, ignore_eos=True)):
            if number > 3:
                break

    def by_callback() -> None:
        ids = [spec.engine.add(p, 8, on_output=lambda output: None) for p in prompts[:3]]
        spec.engine.step()
        spec.engine.abort(ids[1])
        while spec.engine.has_work and not CHANCE.randrange(4):
            spec.engine.step()

    actions = [stream, by_callback, *(lambda p=p: check(p) for p in prompts[:2])]
    thread = threading.Thread(target=other)
    thread.start()
    while interrupter.hits < count:
        interrupter.during(1.5 * seconds, CHANCE.choice(actions))
        while len(spec.engine.waiting) > 3:  # Interrupted streams leave requests behind.
            spec.engine.step()
    stop.set()
    thread.join()
    while spec.engine.has_work:
        spec.engine.step()
    for prompt in prompts:
        check(prompt)
    pool, slots = spec.engine.pages, spec.engine.slots
    assert not faults, (len(faults), faults[:5])
    assert pool.num_free == pool.count
    assert slots.num_free == slots.count
    assert texts[0] > len(prompts), texts
    asyncio.run(withdraw(AsyncEngine(spec), interrupter, count))
    print(f"{interrupter.hits} interrupts, {texts[0]} texts", file=sys.stderr)


def build(count: int, checkpoint: Path, cache: Path) -> None:
    """Interrupt `mtpc.compile`, without and with a cache; the next full call must give the same."""
    import torch

    import mtpc
    from helpers.families import TINY

    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"spec_tokens": 1, "batch_buckets": (1,), "dtype": "float64", **TINY}
    ways = (
        {**chosen, "backend": "eager"},
        {**chosen, "backend": "cpu", "cache_dir": cache},
    )
    prompt, interrupter = [5, 7, 9], Interrupter(sends_sigint=True)
    wanted = [mtpc.compile(checkpoint, **way).generate(prompt, 8) for way in ways]
    while interrupter.hits < count:
        for way, text in zip(ways, wanted, strict=True):
            if CHANCE.random() < 0.5:
                for entry in (cache / "entries").iterdir():
                    if (entry / "step.record.json").exists():
                        shutil.rmtree(entry)  # Made again, and not only read.
            start = time.perf_counter()
            model = mtpc.compile(checkpoint, **way)
            seconds = time.perf_counter() - start
            assert model.generate(prompt, 8) == text, way
            assert not model.stats.fallbacks, model.stats.fallbacks
            for _ in range(4):
                interrupter.during(seconds, lambda way=way: mtpc.compile(checkpoint, **way))
    assert not list((cache / "tmp").iterdir())
    print(f"{interrupter.hits} interrupts", file=sys.stderr)


async def withdraw(engine: AsyncEngine, interrupter: Interrupter, count: int) -> None:
    """Interrupt calls of AsyncEngine that take its lock; its thread must get the lock later."""
    from mtpc.engine.request import Request

    ended = Request(-1, [3], 1, finish_reason="aborted")

    def loop() -> None:
        while True:
            engine._withdraw(ended, "aborted")

    engine.start()
    for _ in range(count):
        interrupter.during(2e-4, loop)
    assert await engine.call(lambda: 5) == 5
    await engine.aclose()


if __name__ == "__main__":
    which, number, *rest = sys.argv[1:]
    if which == "lock":
        lock(int(number))
    elif which == "engine":
        engine(int(number), Path(rest[0]))
    else:
        build(int(number), Path(rest[0]), Path(rest[1]))
    print("done")
