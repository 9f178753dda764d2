"""A lock that whoever waits for gets, however often its holder takes it again."""

from __future__ import annotations

import threading


class FairLock:
    """Reentrant. A thread that steps an engine in a loop cannot keep others from adding to it.

    Waiting threads stand at a gate, one behind it: who releases the lock and wants it again finds
    the gate closed.
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
