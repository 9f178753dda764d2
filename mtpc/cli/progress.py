"""Shows the current stage of the work: as a live line on a terminal, else as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Tell = Callable[[str], None]
"""Called with the name of each stage as it begins."""


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Tell]:
    """Show stages on `stream` until the block ends or raises.

    Args:
        stream: where to write; a terminal gets a live line, and anything else one line a stage.
    """
    with _live(stream) if stream.isatty() else _lines(stream) as tell:
        yield tell


@contextmanager
def _lines(stream: TextIO) -> Iterator[Tell]:
    start = time.perf_counter()

    def tell(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=stream, flush=True)

    yield tell
    tell(_done(start))


@contextmanager
def _live(stream: TextIO) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(file=stream, highlight=False)
    stage, start = "", time.perf_counter()
    began = start
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def tell(text: str) -> None:
            nonlocal stage, began
            now = time.perf_counter()
            if stage:
                console.print(f"{now - began:7.1f} s  {stage}", style="dim", markup=False)
            stage, began = text, now
            progress.reset(task, description=text)

        yield tell
        tell(_done(start))
    console.print(f"           {stage}", style="dim", markup=False)


def _done(start: float) -> str:
    return f"done in {time.perf_counter() - start:.1f} s"
