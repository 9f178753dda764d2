"""Copies of a process that build: they share its tasks, and their ends are those of the build."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpc.errors import BackendError, OptionError
from mtpc.program.workers import beside, build_beside_workers

Act = Callable[[Any], None]


class Heard:
    """What a build's listener hears."""

    def __init__(self, total: int):
        self.lines: list[str] = []
        self.done: list[Any] = []
        self.stages: list[tuple[str, Any]] = []
        self._total = total

    def __call__(self, stage: str, task: Any) -> None:
        self.stages.append((stage, task))

    def line(self, text: str, fraction: float | None = None, /) -> None:
        self.lines.append(text)

    def finished(self, task: Any) -> None:
        self.done.append(task)

    @property
    def is_done(self) -> bool:
        return len(self.done) == self._total


class Builder:
    """Does with each task what it is told, and says which process did it."""

    def __init__(self, act: Act):
        self.tell: Any = None
        self._act = act

    def run(self, tasks: Iterator[Any]) -> None:
        for task in tasks:
            self.tell("build", task)
            self._act(task)
            self.tell.line(f"{os.getpid()} {torch.get_num_threads()}")
            self.tell.finished(task)


def build(act: Act, tasks: list[Any], count: int = 2) -> Heard:
    """Build tasks here and in copies of this process."""
    heard = Heard(len(tasks))
    build_beside_workers(Builder(act), tasks, count, heard)
    return heard


def is_worker() -> bool:
    return multiprocessing.parent_process() is not None


def test_all_build_each_task_once() -> None:
    tasks = list(range(9))
    heard = build(lambda task: time.sleep(0.1), tasks)
    assert sorted(heard.done) == tasks
    assert sorted(task for _, task in heard.stages) == tasks
    threads = dict(line.split() for line in heard.lines)
    assert len(threads) == 3
    assert {n for pid, n in threads.items() if int(pid) != os.getpid()} == {"1"}


def refuse(task: Any) -> None:
    if is_worker():
        raise OptionError("no such thing")
    time.sleep(0.1)


def die(task: Any) -> None:
    if is_worker():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [(refuse, OptionError, "no such thing"), (die, BackendError, "a building process ended with")],
)
def test_a_worker_that_fails_ends_the_build(act: Act, error: type[Exception], message: str) -> None:
    """Soon, and not after this process has built the rest alone."""
    start = time.monotonic()
    with pytest.raises(error, match=message):
        build(act, list(range(100)))
    assert time.monotonic() - start < 8
    assert not multiprocessing.active_children()


def test_an_error_of_this_process_ends_the_workers() -> None:
    def fail(task: Any) -> None:
        if not is_worker():
            raise OptionError("not here")
        time.sleep(30)

    with pytest.raises(OptionError, match="not here"):
        build(fail, list(range(3)))
    assert not multiprocessing.active_children()


def test_ctrl_c_is_for_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal sends it to all; the parent decides when it takes effect."""

    def interrupt(task: Any) -> None:
        if is_worker():
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    heard = build(interrupt, list(range(6)))
    assert len({line.split()[0] for line in heard.lines}) == 3
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("in_copy", [False, True])
def test_what_is_made_beside_is_there_at_the_end(in_copy: bool, tmp_path: Path) -> None:
    begin, said = multiprocessing.get_context("fork").Event(), tmp_path / "said"

    def work() -> None:
        assert begin.wait(30) or not in_copy
        said.write_text(f"{os.getpid()} {torch.get_num_threads()}")

    if not in_copy:
        begin.set()
    with beside(work, in_copy):
        assert said.exists() is not in_copy
        begin.set()
    pid, threads = map(int, said.read_text().split())
    assert (pid == os.getpid()) is not in_copy
    assert threads == 1 or not in_copy


def test_an_error_of_this_process_ends_what_is_made_beside() -> None:
    start = time.monotonic()
    with pytest.raises(OptionError), beside(lambda: time.sleep(60), True):
        raise OptionError("not here")
    assert time.monotonic() - start < 8
    assert not multiprocessing.active_children()
