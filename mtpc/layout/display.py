"""The stages of a compilation, as texts with the share that is done; see also `layout.terminal`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from mtpc.layout.progress import Detail, Listener, Progress

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
class Estimate:
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
        return f"{min(share, 0.99):.0%}, {duration_text(left)} left"


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
        yield stage_listener(once(log.info), verbose=True)
        return
    with _of_this_process() as tell:
        yield stage_listener(tell)


def _of_this_process() -> AbstractContextManager[Tell]:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_notebook = shell is not None and "IPKernelApp" in shell.config
    if not is_notebook and not sys.stderr.isatty():
        return nullcontext(ignore)
    from mtpc.layout.terminal import live, notebook  # Not above: servers have neither.

    return notebook() if is_notebook else live(sys.stderr)


def stage_listener(tell: Tell, verbose: bool = False) -> Listener:
    """A listener that shows a compilation's progress: a line for compiling, with a bar, and one for
    loading. If verbose, it shows a line `i/n stage step` for each stage of each step, and every
    `Detail`."""
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
            about = "" if left_s is None else f", about {duration_text(left_s)}"
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


def ignore(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
    """A `Tell` that shows nothing."""


def once(write: Callable[[str], object]) -> Tell:
    """Writes a line for each stage, when it begins."""
    last = ""

    def tell(text: str, fraction: float | None = None, left_s: float | None = None, /) -> None:
        nonlocal last
        if text != last:
            share = str(Estimate(fraction, left_s))
            write(f"{text} ({share})" if share else text)
        last = text

    return tell


def duration_text(seconds: float) -> str:
    """`75.2` -> `1:15`; `8.4` -> `8 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02}"
