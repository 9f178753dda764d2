"""A lock that every waiting thread gets, even if its holder releases and retakes it in a loop."""

from __future__ import annotations

import threading


class FairLock:
    """A reentrant lock. A thread that steps an engine in a loop cannot starve the other threads.

    Each thread must pass a gate before it takes the lock, and waits for the lock while it holds
    the gate. A thread that releases the lock and wants it again therefore waits at the gate.
    """

    def __init__(self) -> None:
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._gate:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *unused: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
