"""Shows the current stage of the work: a live line with a bar, or one plain line a stage."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from mtpc.layout.progress import Detail, Listener, Progress

_BAR = 20
"""Width of the bar, in columns."""
log = logging.getLogger("mtpc")


class Tell(Protocol):
    """Called with the name of each stage as it begins, and again when more of it is done.

    Args:
        text: the stage.
        fraction: share of the work that is done, from 0 to 1, or None.
        left_s: seconds that the work will still take, or None.
    """

    def __call__(
        self, text: str, fraction: float | None = None, left_s: float | None = None, /
    ) -> None: ...


@dataclass(frozen=True)
class _Estimate:
    """How far the work was at the moment `since`. As text: how far it should be now."""

    fraction: float | None = None
    left_s: float | None = None
    since: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        if self.fraction is None or (self.left_s is None and not self.fraction):
            return ""
        if self.left_s is None:
            return f"{self.fraction:.0%}"
        passed, share = time.perf_counter() - self.since, self.fraction
        if self.left_s > 0:
            share += (1 - share) * min(1.0, passed / self.left_s)
        left = max(0.0, self.left_s - passed)
        return f"{min(share, 0.99):.0%}, {_duration(left)} left"


def show_progress(stream: TextIO, quiet: bool = False) -> AbstractContextManager[Tell]:
    """Show stages on `stream` until the block ends or raises.

    Args:
        stream: where to write; a terminal gets a live line, and anything else one line a stage.
        quiet: show nothing.
    """
    if quiet:
        return nullcontext(_ignore)
    return _live(stream) if stream.isatty() else _lines(stream)


@contextmanager
def show_compiling(listener: Listener | None) -> Iterator[Listener]:
    """The listener of a compilation: the caller's or, without one, one that tells the user.

    If the logger `mtpc` is on for level INFO, it gets a line for each stage. Otherwise a terminal
    (stderr) or a notebook shows a live line until the block ends, and a line for each later call.
    """
    if listener is not None:
        yield listener
        return
    if log.isEnabledFor(logging.INFO):
        yield stage_listener(_once(log.info), verbose=True)
        return
    with _of_this_process() as tell:
        yield stage_listener(tell)


def _of_this_process() -> AbstractContextManager[Tell]:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and "IPKernelApp" in shell.config:
        return _notebook()
    return _live(sys.stderr) if sys.stderr.isatty() else nullcontext(_ignore)


def stage_listener(tell: Tell, verbose: bool = False) -> Listener:
    """A listener that shows a compilation's progress.

    Args:
        tell: shows it.
        verbose: show a line `i/n stage step` for each stage of each step, and every `Detail`. By
            default there is one line for compiling, with a bar, and one for loading.
    """
    if verbose:
        return _verbose_listener(tell)
    compiling = ""

    def listen(progress: Progress) -> None:
        nonlocal compiling
        done, stage = progress.done, progress.stage
        if progress.total == 0 and not isinstance(stage, Detail):  # The backend prepares itself.
            tell(stage, progress.fraction, progress.left_s)
        elif stage == "load" and progress.total:
            tell("load the weights", progress.fraction, progress.left_s)
        elif done < progress.total and not compiling:
            left_s = progress.left_s
            about = "" if left_s is None else f", about {_duration(left_s)}"
            compiling = f"compiling (first time{about})"
            tell(compiling)
        elif done < progress.total:
            share = done / progress.total if progress.fraction is None else progress.fraction
            tell(compiling, share, progress.left_s)

    return listen


def _verbose_listener(tell: Tell) -> Listener:
    def listen(progress: Progress) -> None:
        if progress.key is not None:
            text = f"{progress.done + 1}/{progress.total} {progress.stage} {progress.key}"
        elif progress.done < progress.total:
            text = f"{progress.stage} (for {progress.total} steps)"
        elif progress.total == 0:  # The backend prepares itself.
            text = progress.stage
        else:
            return
        tell(text, progress.fraction, progress.left_s)

    return listen


def _ignore(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
    """A `Tell` that shows nothing."""


def _once(write: Callable[[str], object]) -> Tell:
    """Writes a line for each stage, when it begins."""
    last = ""

    def tell(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
        nonlocal last
        if text != last:
            share = str(_Estimate(fraction, left_s))
            write(f"{text} ({share})" if share else text)
        last = text

    return tell


@contextmanager
def _lines(stream: TextIO) -> Iterator[Tell]:
    start = time.perf_counter()

    def write(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=stream, flush=True)

    yield _once(write)
    write(_done(start))


@contextmanager
def _live(stream: TextIO) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Live

    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(_BAR),
        TextColumn("{task.fields[estimate]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    console = Console(file=stream, highlight=False)
    stage, start, is_over = "", time.perf_counter(), False
    began = start
    with Live(*columns, console=console, transient=True) as live:
        task = live.add_task("", total=None, estimate="")

        def tell(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
            nonlocal stage, began
            if is_over:  # Another thread still builds.
                console.print(text, style="dim", markup=False)
                return
            now = time.perf_counter()
            if text != stage:
                if stage:
                    console.print(f"{now - began:7.1f} s  {stage}", style="dim", markup=False)
                stage, began = text, now
                live.reset(task, description=text)
            live.tasks[0].total = None if fraction is None else 1.0
            live.update(task, completed=fraction or 0.0, estimate=_Estimate(fraction, left_s))

        yield tell
        tell(_done(start))
        is_over = True
    console.print(f"           {stage}", style="dim", markup=False)


@contextmanager
def _notebook() -> Iterator[Tell]:
    """One line of a cell's output, which each stage replaces."""
    display: Any = sys.modules["IPython"].display
    start = time.perf_counter()
    shown = display.display({"text/plain": ""}, raw=True, display_id=True)

    def tell(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
        cells = [f"{time.perf_counter() - start:.1f} s", str(_Estimate(fraction, left_s)), text]
        if fraction is not None:
            full = round(_BAR * fraction)
            cells.insert(1, "█" * full + "░" * (_BAR - full))
        shown.update({"text/plain": "  ".join(filter(None, cells))}, raw=True)

    yield tell
    tell(_done(start))


def _duration(seconds: float) -> str:
    """`75.2` -> `1:15`; `8.4` -> `8 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02}"


def _done(start: float) -> str:
    return f"done in {time.perf_counter() - start:.1f} s"
