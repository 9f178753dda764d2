"""Ctrl-C while this process traces, which takes effect at the next stage.

torch traces under thread-local modes, and enters them in several steps. A KeyboardInterrupt between
two of these leaves a mode on, and then the next trace fails or ends the process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from mtpc.layout.progress import Listener, Progress

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
