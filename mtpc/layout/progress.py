"""What compilation and loading report to a caller that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mtpc.layout import StepKey


@dataclass(frozen=True)
class Progress:
    """One beginning or finished stage.

    Attributes:
        stage: "trace model", "trace", "rewrite", "lower", "capture", "load", "done", or a line on
            what a backend or the cache is doing.
        key: the step, or None for work that all steps share.
        done: steps finished so far.
        total: steps to compile; 0 where there are none yet.
        elapsed_s: seconds since the work began.
    """

    stage: str
    key: StepKey | None
    done: int
    total: int
    elapsed_s: float


Listener = Callable[[Progress], None]


def line_reporter(listener: Listener) -> Callable[[str], None]:
    """Tells lines that belong to no step, with the time from now on."""
    start = time.perf_counter()
    return lambda line: listener(Progress(line, None, 0, 0, time.perf_counter() - start))
