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
        stage: "trace model", "trace", "rewrite", "lower", "capture", "load", or a line on
            what a backend or the cache is doing.
        key: the step, or None for work that all steps share.
        done: steps finished so far.
        total: steps to compile; 0 where there are none yet.
        elapsed_s: seconds since the work began.
        fraction: share of the work that is done, from 0 to 1; None where it is not known.
            Compiling the kernels, building steps and loading weights are counted separately. The
            share of building comes from the seconds of each stage in the most similar cached step.
        left_s: seconds until the work is done; None where that is not known.
    """

    stage: str
    key: StepKey | None
    done: int
    total: int
    elapsed_s: float
    fraction: float | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class PassRecord:
    """What one pass did, in so many seconds; nodes are operations in the graph."""

    name: str
    rewrites: int
    seconds: float
    nodes_before: int
    nodes_after: int


class Detail(str):
    """A line for people who look closely: it names steps, files or sizes."""

    __slots__ = ()


Listener = Callable[[Progress], None]


class Report(Protocol):
    """Called with a line that says what is being done, and with the share that is done."""

    def __call__(self, line: str, fraction: float | None = None, /) -> None: ...


def silent(line: str, fraction: float | None = None, /) -> None:
    """A `Report` that ignores its lines."""


def left_at(fraction: float, elapsed_s: float) -> float | None:
    """Seconds left if the work goes on at its average speed; None if none of it is done yet."""
    return elapsed_s * (1 - fraction) / fraction if fraction else None


def line_reporter(listener: Listener) -> Report:
    """A `Report` that passes lines of no particular step on to `listener`; time counts from now."""
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
