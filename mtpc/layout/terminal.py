"""Shows the current stage of the work: a live line with a bar, or one plain line a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

from mtpc.layout.display import Estimate, Tell, ignore, once

_BAR = 20
"""Width of the bar, in columns."""


def show_progress(stream: TextIO, quiet: bool = False) -> AbstractContextManager[Tell]:
    """Show stages on `stream` until the block ends or raises: a terminal gets a live line, and
    anything else one line a stage. If quiet, show nothing."""
    if quiet:
        return nullcontext(ignore)
    return live(stream) if stream.isatty() else _lines(stream)


@contextmanager
def _lines(stream: TextIO) -> Iterator[Tell]:
    start = time.perf_counter()

    def write(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=stream, flush=True)

    yield once(write)
    write(_done(start))


@contextmanager
def live(stream: TextIO) -> Iterator[Tell]:
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
            live.update(task, completed=fraction or 0.0, estimate=Estimate(fraction, left_s))

        yield tell
        tell(_done(start))
        is_over = True
    console.print(f"           {stage}", style="dim", markup=False)


@contextmanager
def notebook() -> Iterator[Tell]:
    """One line of a cell's output, which each stage replaces."""
    display: Any = sys.modules["IPython"].display
    start = time.perf_counter()
    shown = display.display({"text/plain": ""}, raw=True, display_id=True)

    def tell(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
        cells = [f"{time.perf_counter() - start:.1f} s", str(Estimate(fraction, left_s)), text]
        if fraction is not None:
            full = round(_BAR * fraction)
            cells.insert(1, "█" * full + "░" * (_BAR - full))
        shown.update({"text/plain": "  ".join(filter(None, cells))}, raw=True)

    yield tell
    tell(_done(start))


def _done(start: float) -> str:
    return f"done in {time.perf_counter() - start:.1f} s"
