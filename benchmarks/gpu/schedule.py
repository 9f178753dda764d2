"""Decides which cases fit before benchmarks.gpu's deadline, from the times of earlier cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Schedule:
    """Starts no case that would pass the deadline if it took as long as the longest such case.

    Attributes:
        seconds: the deadline, from when this was made.
        clock: counts seconds.
        left_out: what was not begun.
        longest: seconds of the longest case so far, by kind.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def fits(self, kind: str, what: str, share: float = 1.0) -> bool:
        """Whether to begin a case; what does not fit is noted.

        Args:
            kind: of case. One of which there was none yet may take as long as any other did.
            what: the case, for people.
            share: of the deadline, that it has to end by.
        """
        expected = self.longest.get(kind, max(self.longest.values(), default=0.0))
        if self.clock() - self._start + expected <= share * self.seconds:
            return True
        self.left_out.append(what)
        return False

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Around a case of a kind."""
        begin = self.clock()
        try:
            yield
        finally:
            self.longest[kind] = max(self.longest.get(kind, 0.0), self.clock() - begin)
