"""Blocks that may take so much time, memory or disk, and no more."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TooLongError(BaseException):
    """Not an Exception, which the code under test may catch."""


@contextmanager
def bounded(seconds: int = 10, nbytes: int = 2 << 30) -> Iterator[None]:
    """A block that may take so many seconds, and so many bytes besides what is in use before.

    A system call that waits is interrupted, too.
    """

    def end(*_: Any) -> None:
        raise TooLongError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    used = peak()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert peak() - used < nbytes


def peak() -> int:
    """The most bytes of this process's resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


@contextmanager
def full_disk() -> Iterator[None]:
    """Writing a file of more than 100 bytes fails, by the system's own limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
