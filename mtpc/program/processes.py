"""Processes that end together: what a build starts does not outlive it.

A build runs workers, and these run compilers. SIGTERM ends a process as Ctrl-C does, so that its
temporary directories are removed; its children are ended first, so that it waits for none.

Ctrl-C while this process traces takes effect at the next stage (`HeldInterrupts`). torch traces
under thread-local modes, and enters them in several steps. A KeyboardInterrupt between two of these
leaves a mode on, and then the next trace fails or ends the process.

`Workers` build beside this process. They are copies of it, made when it has traced a model:

    this process: tasks ->               | worker: `build.Builder.run`
    <- stages, lines, what is finished   | as any other builder, through the cache

A copy has what this process has loaded and traced, at once and in the same memory. It lacks this
process's other threads, so it runs torch on one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from mtpc import errors
from mtpc.errors import BackendError, MtpcError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from mtpc.layout.progress import Listener, Progress
    from mtpc.program.build import Builder, Task, Teller

WORKER = 2**30
"""Bytes that a building process takes. It reads no weights: its libraries and graphs are 470 MiB
for a dense model of 36 layers, and 800 MiB for DeepSeek-V3 of 61."""
_PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that a process receives when its parent ends."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM ends all children and raises SystemExit(143); a second one kills.

    Outside of the main thread, which alone may set signal handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Within the block, no cycles are collected.

    A build leaves some 10 MiB of them per step. Collecting them takes a seventh of its time,
    because each collection visits all objects of torch, transformers and the graphs.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def start_python(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python that has this one's modules, and runs a module's `serve`.

    Args:
        module: its function `serve` gets the file descriptor of its end of a pipe.

    Returns:
        The process, and this one's end of the pipe.

    Raises:
        OSError: the system lacks memory, processes or file descriptors.
    """
    from multiprocessing.connection import Pipe  # Not above: `--help` imports this module.

    ours, theirs = Pipe()
    handle = theirs.fileno()
    # No `multiprocessing.Process`: that would run the caller's main module a second time.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import serve; serve({handle})"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[handle],
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the other one.
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def end_with_parent() -> None:
    """Make this process, a child, receive SIGTERM when its parent ends in any way; Linux only."""
    with contextlib.suppress(OSError, AttributeError):  # Another system.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_children() -> None:
    """Send SIGTERM to all processes that this one started, and to those that they started."""
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)


def how_it_ended(status: int) -> str:
    """How a building process died, and what to do.

    Args:
        status: its exit status; negative for a signal.
    """
    if status != -signal.SIGKILL:
        return f"status {status}; what it said is on stderr"
    free = free_bytes()
    left = "" if free is None else f", and {free / 2**30:.1f} GiB are free"
    return (
        f"status {status}: the system killed it, as a rule because memory ran out; a process needs "
        f"some {WORKER / 2**30:.1f} GiB{left}: use `mtpc build --jobs 1`, or build on a larger "
        "machine and copy the cache"
    )


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_children()
    raise SystemExit(128 + number)


def _descendants(pid: int) -> list[int]:
    """Processes below one, parents first; [] on a system without /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # It has ended meanwhile.
            # "PID (NAME) STATE PARENT ...", where NAME may hold anything.
            children[int(path.read_text().rpartition(")")[2].split()[1])].append(
                int(path.parent.name)
            )
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Bytes that this process can still have without swapping others out; None if unknown.

    It is the system's estimate or, in a container, what the container's limit leaves.
    """
    system = _numbers(Path("/proc/meminfo"))
    found = [system[name] * 1024 for name in ("MemAvailable",) if name in system]
    with contextlib.suppress(OSError, ValueError):  # There is no limit ("max"), or no cgroup.
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = _numbers(_CGROUP / "memory.stat").get("inactive_file", 0)
        found.append(max(0, limit - used + cached))
    return min(found, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; {} where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


IMPATIENT_S = 1.0
"""A second Ctrl-C takes effect at once if it comes this many seconds after the first."""


class HeldInterrupts:
    """Within its block SIGINT has no effect before the next call of `tell`, or the block's end.

    It does nothing outside of the main thread, which alone receives signals, and where SIGINT has
    no handler in Python.

    Args:
        listener: called with progress.
    """

    def __init__(self, listener: Listener):
        self._listener = listener
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._since_s: float | None = None

    def tell(self, progress: Progress) -> None:
        """Call the listener; then raise what was held."""
        self._listener(progress)
        self._release()

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._release()
            self._before = None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        elif now - self._since_s > IMPATIENT_S and self._before is not None:
            self._before(number, frame)

    def _release(self) -> None:
        if self._since_s is not None and self._before is not None:
            self._since_s = None
            self._before(signal.SIGINT, None)


_POLL_S = 0.2
_GRACE_S = 10.0
"""Seconds that a worker has to clean up, once it was told to end."""


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
        import multiprocessing  # Not above: `--help` imports this module.

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
        """Pass on what workers have reported; wait up to `wait_s` seconds for the first report."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, data = self._events.get(timeout=wait_s)
                self._pass_on(kind, data)
                wait_s = 0.0
        self._check_alive()

    def _pass_on(self, kind: str, data: tuple[Any, ...]) -> None:
        if kind == "error":
            name, message = data
            raise getattr(errors, name)(message)
        getattr(self._tell, kind)(*data)

    def _check_alive(self) -> None:
        """End the build if a worker died without an error, usually for want of memory."""
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
    import multiprocessing  # Not above: `--help` imports this module.

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
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _be_a_copy() -> None:
    """What each copy of this process begins with.

    Ctrl-C in a terminal reaches it, too, but its parent ends it.
    """
    import torch  # Not above: `--help` imports this module.

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
    from multiprocessing import parent_process

    parent = parent_process()
    while parent is None or parent.is_alive():
        try:
            task = tasks.get(timeout=1)
        except queue.Empty:
            continue
        if task is None:
            return
        yield task
