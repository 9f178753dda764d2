"""Processes that end together: what a build starts does not outlive it.

A build runs workers, and these run compilers. SIGTERM ends a process as Ctrl-C does, so that its
temporary directories are removed; its children are ended first, so that it waits for none.

Ctrl-C while this process traces takes effect at the next stage (`HeldInterrupts`). torch traces
under thread-local modes, and enters them in several steps. A KeyboardInterrupt between two of these
leaves a mode on, and then the next trace fails or ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mtpc.layout.progress import Listener, Progress

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


def default_jobs() -> int:
    """One process for each core, or fewer if the free memory does not hold so many.

    Only on Linux can a process be copied safely.
    """
    if sys.platform != "linux":
        return 1
    free = free_bytes()
    fit = free // WORKER if free is not None else 1
    return max(1, min(os.cpu_count() or 1, fit))


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
