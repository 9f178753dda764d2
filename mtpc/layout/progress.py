"""What compilation and loading report to a caller that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mtpc.layout import StepKey


@dataclass(frozen=True)
class Progress:
    """One beginning or finished stage, or how far a long one is.

    Attributes:
        stage: "trace model", "trace", "rewrite", "lower", "capture", "load", "done", or a line on
            what a backend or the cache is doing.
        key: the step, or None for work that all steps share.
        done: steps finished so far.
        total: steps to compile; 0 where there are none yet.
        elapsed_s: seconds since the work began.
        fraction: share of the work that is done, from 0 to 1; None where it is not known.
            Compiling the kernels, building steps and loading weights are three works. Building is
            measured by what each stage took in the nearest step of the graph cache.
        left_s: seconds that the work will take from now on; None where that is not known.
    """

    stage: str
    key: StepKey | None
    done: int
    total: int
    elapsed_s: float
    fraction: float | None = None
    left_s: float | None = None


Listener = Callable[[Progress], None]


class Report(Protocol):
    """Is called with a line that says what is being done, and how much of that is done."""

    def __call__(self, line: str, fraction: float | None = None, /) -> None: ...


def silent(line: str, fraction: float | None = None, /) -> None:
    """A `Report` that ignores its lines."""


def left_at(fraction: float, elapsed_s: float) -> float | None:
    """Seconds left of work that goes on at its pace so far; None before there is a pace."""
    return elapsed_s * (1 - fraction) / fraction if fraction else None


def line_reporter(listener: Listener) -> Report:
    """Tells lines that belong to no step, with the time from now on."""
    start = time.perf_counter()
    last, since = "", start

    def report(line: str, fraction: float | None = None, /) -> None:
        nonlocal last, since
        now = time.perf_counter()
        if line != last:
            last, since = line, now
        left_s = None if fraction is None else left_at(fraction, now - since)
        listener(Progress(line, None, 0, 0, now - start, fraction, left_s))

    return report
