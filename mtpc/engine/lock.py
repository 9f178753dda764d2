"""A lock that waiting threads get in turn."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

PATIENCE_S = 0.005
"""The longest time, in seconds, that a thread lets those before it take the lock first."""
_PAUSE_S = 2e-5


class FairLock:
    """A reentrant lock. A thread that steps an engine in a loop cannot starve the other threads.

    Use it in this form:

        with lock.in_turn():
            is_nested = lock.arrived()

    The `with` statement enters an RLock of CPython itself, which no interrupt leaves taken.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        # Identifiers of the threads that want the lock, and whether each has it already.
        self._waiting: dict[int, bool] = {}

    @property
    def is_mine(self) -> bool:
        return bool(self._lock._is_owned())

    def in_turn(self) -> AbstractContextManager[object]:
        """Let the threads that wait already go first, then return the lock to enter."""
        me, is_mine = threading.get_ident(), self.is_mine
        if self._waiting and not is_mine:
            before, end = set(self._waiting) - {me}, time.monotonic() + PATIENCE_S
            while not before.isdisjoint(self._waiting) and time.monotonic() < end:
                time.sleep(_PAUSE_S)
        self._waiting[me] = is_mine
        return self._lock

    def arrived(self) -> bool:
        """Record that this thread waits no more. Returns whether it had the lock before."""
        return self._waiting.pop(threading.get_ident(), False)
