"""Copies of a building process, which work beside it.

`Workers` build beside this process. They are copies of it, made when it has traced a model:

    this process: tasks ->               | worker: `build.Builder.run`
    <- stages, lines, what is finished   | as any other builder, through the cache

A copy has what this process has loaded and traced, at once and in the same memory. It lacks this
process's other threads, so it runs torch on one thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mtpc import errors
from mtpc.errors import BackendError, CheckpointError, MtpcError
from mtpc.program.processes import (
    GRACE_S,
    default_jobs,
    end_with_parent,
    ended_by_sigterm,
    how_it_ended,
)
from mtpc.store.entries import EntryStore
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from mtpc.program.build import Builder, Task, Teller

_POLL_S = 0.2


class Tell(Protocol):
    """Receives a build's progress."""

    def __call__(self, stage: str, task: Task | None) -> None:
        """A stage of a task begins, or of all tasks."""
        ...

    def line(self, text: str, fraction: float | None = None, /) -> None:
        """A line that concerns no step."""
        ...

    def finished(self, task: Task) -> None:
        """One more step is in the cache."""
        ...


class Workers:
    """Copies of this process that build, and their reports.

    This process builds, too. For its own work, `Workers` is the `Tell`: each call also passes on
    what workers have reported meanwhile.

    Args:
        builder: of this process.
        todo: the tasks. Each process takes one after the other.
        count: how many workers to start.
        tell: called with the progress of all.
    """

    def __init__(self, builder: Builder, todo: list[Task], count: int, tell: Teller):
        context = multiprocessing.get_context("fork")
        self._tell, self.line, self.finished = tell, tell.line, tell.finished
        self._tasks, self._events = context.Queue(), context.Queue()
        for task in [*todo, *[None] * (count + 1)]:
            self._tasks.put(task)
        self._processes = [
            context.Process(target=_work, args=(builder, self._tasks, self._events), daemon=True)
            for _ in range(count)
        ]
        _start(self._processes)

    def __call__(self, stage: str, task: Task | None) -> None:
        self._hear()
        self._tell(stage, task)

    def tasks(self) -> Iterator[Task]:
        """The tasks of this process."""
        return _drain(self._tasks)

    def wait(self) -> None:
        """Wait until every step is in the cache, or all workers have ended.

        Raises:
            MtpcError: a worker ended with it, or died.
        """
        while not self._tell.is_done and any(process.is_alive() for process in self._processes):
            self._hear(_POLL_S)
        self._hear()

    def end(self) -> None:
        """End all workers."""
        _end_all(self._processes)

    def _hear(self, wait_s: float = 0.0) -> None:
        """Pass on what workers have reported; wait up to `wait_s` seconds for the first report.

        Raises:
            MtpcError: a worker ended with it, or died.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                kind, data = self._events.get(timeout=wait_s)
                if kind == "error":
                    name, message = data
                    raise getattr(errors, name)(message)
                getattr(self._tell, kind)(*data)
                wait_s = 0.0
        # One may have died without an error, usually for want of memory.
        dead = [each.exitcode for each in self._processes if each.exitcode not in (None, 0)]
        if dead:
            raise BackendError(
                f"a building process ended with {how_it_ended(dead[0])}; what it had finished "
                "is in the cache"
            )


@contextlib.contextmanager
def beside(work: Callable[[], None], in_copy: bool) -> Iterator[None]:
    """Have some work done by the end of the block.

    Args:
        work: what is made for others to find, as in the cache.
        in_copy: a copy of this process does it meanwhile; or else this one, before the block.
    """
    if not in_copy:
        work()
        yield
        return

    def begin() -> None:
        _be_a_copy()
        with ended_by_sigterm():
            work()

    process = multiprocessing.get_context("fork").Process(target=begin, daemon=True)
    _start([process])
    try:
        yield
        process.join()
    finally:
        _end_all([process])


def keeping_tokenizer(
    cache_dir: Path, directory: Path, jobs: int | None
) -> contextlib.AbstractContextManager[None]:
    """Make a checkpoint's tokenizer beside a build, and keep it, unless the cache has it.

    transformers makes it, which a build imports anyway, and what starts from the cache does not.

    Args:
        cache_dir: the cache.
        directory: the checkpoint.
        jobs: processes of the build; None is one a core, as far as memory holds them.
    """
    kept = KeptTokenizers(EntryStore(cache_dir))

    def make() -> None:
        with contextlib.suppress(CheckpointError):  # What reads text reports it.
            _ = ServedModel(str(directory), 0, (), directory, kept).has_tokenizer

    return beside(make, (jobs or default_jobs()) > 1)


def _start(processes: Sequence[BaseProcess]) -> None:
    with warnings.catch_warnings():
        # From Python 3.12 on: that a copy lacks other threads, which torch may have started.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()


def _end_all(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _be_a_copy() -> None:
    """What each copy of this process begins with.

    Ctrl-C in a terminal reaches it, too, but its parent ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)


def build_beside_workers(builder: Builder, todo: list[Task], count: int, tell: Teller) -> None:
    """Build tasks in this process, and in so many copies of it.

    Raises:
        MtpcError: a worker ended with it, or died.
    """
    workers = Workers(builder, todo, count, tell)
    builder.tell = workers
    try:
        builder.run(workers.tasks())
        workers.wait()
    finally:
        workers.end()


class _Remote:
    """A worker's `Tell`: sends what it hears to the parent, by the names of the methods."""

    def __init__(self, events: Any):
        self._events = events

    def __call__(self, stage: str, task: Task | None) -> None:
        self._events.put(("__call__", (stage, task)))

    def line(self, text: str, fraction: float | None = None, /) -> None:
        self._events.put(("line", (text, fraction)))

    def finished(self, task: Task) -> None:
        self._events.put(("finished", (task,)))


def _work(builder: Builder, tasks: Any, events: Any) -> None:
    """A worker process."""
    _be_a_copy()
    builder.tell = _Remote(events)
    try:
        with ended_by_sigterm():
            builder.run(_drain(tasks))
    except MtpcError as error:
        events.put(("error", (type(error).__name__, str(error))))


def _drain(tasks: Any) -> Iterator[Task]:
    """Tasks until the queue says stop, or the process that wants them has ended."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        try:
            task = tasks.get(timeout=1)
        except queue.Empty:
            continue
        if task is None:
            return
        yield task
