"""Processes that end together: what a build starts does not outlive it.

A build runs workers, and these run compilers. SIGTERM ends a process as Ctrl-C does, so that its
temporary directories are removed; its children are ended first, so that it waits for none.
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
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mtpc.environment import free_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

WORKER = 2**30
"""Bytes that a building process takes. It reads no weights: its libraries and graphs are 470 MiB
for a dense model of 36 layers, and 800 MiB for DeepSeek-V3 of 61."""
GRACE_S = 10.0
"""Seconds that a building process has to clean up, once it was told to end."""
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
    # No `multiprocessing.Process`: that would run the caller's main module a second time. What the
    # imports leave stays, so no collection looks at it: that took an eighth of torch's import.
    code = (
        f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; from {module} import serve; "
        f"gc.freeze(); gc.enable(); serve({handle})"
    )
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


class Copy:
    """A copy of this process, as its owner sees it: what of `subprocess.Popen` that is asked for.

    Args:
        process: the copy, which was started.
    """

    def __init__(self, process: BaseProcess):
        self._process, self.kill = process, process.kill

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, for so many seconds.

        Raises:
            TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a copy of this process", timeout or 0.0)
        return self.returncode


def start_beside(module: str) -> tuple[subprocess.Popen[bytes] | Copy, Connection]:
    """As `start_python`, but with what this process has imported, where it can be copied: it is the
    only thread of its process, so that the copy lacks none, and no lock stays held in it."""
    if not _is_alone():
        return start_python(module)
    from multiprocessing import Pipe, get_context

    ours, theirs = Pipe()

    def begin() -> None:
        ours.close()
        os.setsid()  # As in `start_python`.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(null, standard)
        handle = os.dup(theirs.fileno())
        theirs.close()
        import_module(module).serve(handle)

    process = get_context("fork").Process(target=begin)
    try:
        process.start()
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Copy(process), ours


def _is_alone() -> bool:
    """Whether this process has one thread, those of libraries counted; False without /proc."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


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


def default_jobs() -> int:
    """One process for each core, or fewer if the free memory does not hold so many.

    Only on Linux can a process be copied safely.
    """
    if sys.platform != "linux":
        return 1
    free = free_bytes()
    fit = free // WORKER if free is not None else 1
    return max(1, min(os.cpu_count() or 1, fit))
