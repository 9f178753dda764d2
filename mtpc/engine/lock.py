"""A lock that waiting threads get in turn, and that an interrupt cannot leave taken."""

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
            lock.arrived()

    Ctrl-C raises KeyboardInterrupt between any two bytecodes of the main thread. A lock in Python
    code could therefore be left taken, between taking it and the begin of the `with` block. So the
    `with` statement here enters an RLock of CPython itself: that call takes the lock and records
    its owner in C, and CPython handles no signal between it and the begin of the block. Whatever
    an interrupt leaves of `in_turn` and `arrived` is a mark, which costs other threads at most
    `PATIENCE_S` until this thread comes again.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._waiting: dict[int, None] = {}  # Identifiers of the threads that want the lock.

    def in_turn(self) -> AbstractContextManager[object]:
        """Let the threads that wait already go first, then return the lock to enter."""
        me = threading.get_ident()
        if self._waiting and not self._lock._is_owned():
            before, end = set(self._waiting) - {me}, time.monotonic() + PATIENCE_S
            while not before.isdisjoint(self._waiting) and time.monotonic() < end:
                time.sleep(_PAUSE_S)
        self._waiting[me] = None
        return self._lock

    def arrived(self) -> None:
        """Record that this thread has the lock and waits no more."""
        self._waiting.pop(threading.get_ident(), None)
