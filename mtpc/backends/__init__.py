"""Backends: how a StepGraph runs on a machine. A backend is one file and one row of `BACKENDS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from mtpc.backends.base import Backend
from mtpc.config import CompileOptions
from mtpc.errors import BackendError, OptionError
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import EntryStore


def _cpu(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.cpu import CpuBackend

    return CpuBackend(report, store)


def _cuda(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.cuda import open_cuda

    return open_cuda(report, store)


def _eager(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.eager import EagerBackend

    return EagerBackend()


def _null(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.null import NullDevice

    return NullDevice()


@dataclass(frozen=True)
class Row:
    """What is known of a backend before it is made.

    Attributes:
        make: makes it from a reporter and the store that keeps its kernels.
        has_packages: its steps are files, which the graph cache keeps.
        has_kernels: it takes kernels from the graph cache.
        skips_idle_rows: its kernels leave out the rows that a prefill step lacks.
        is_gpu: it runs on GPUs.
    """

    make: Callable[[Report, EntryStore | None], Backend]
    has_packages: bool = False
    has_kernels: bool = False
    skips_idle_rows: bool = False
    is_gpu: bool = False


BACKENDS = {
    "cpu": Row(_cpu, has_packages=True, has_kernels=True, skips_idle_rows=True),
    "cuda": Row(_cuda, has_kernels=True, is_gpu=True),
    "eager": Row(_eager),
    "null": Row(_null),
}
AUTO = ("cpu", "eager")
"""What the option's value "auto" stands for: the first of these that works here."""
PACKAGING = next(name for name, row in BACKENDS.items() if row.has_packages)
"""The backend that compiles ahead of time."""


def first_choice(name: str) -> Row | None:
    """The row of an option's value, "auto" included; None for an unknown name."""
    return BACKENDS.get(AUTO[0] if name == "auto" else name)


def settle_prefill(options: CompileOptions, dtype: str | None) -> CompileOptions:
    """Options with the chunks of prompts settled, for weights that are stored in a dtype."""
    row = first_choice(options.backend)
    if row is not None and row.is_gpu:
        return options.for_gpu()
    return options.for_weights(dtype, row is not None and row.skips_idle_rows)


def choose_backend(
    name: str, strict: bool, report: Report, store: EntryStore | None = None
) -> tuple[Backend, str | None]:
    """The backend for a value of the option `backend`, and why it is not the first choice.

    The reason is None if it is the first choice.

    Args:
        name: a backend, or "auto": the first of `AUTO` that works here.
        strict: whether "auto" must not fall back.
        report: is called with a line before long work.
        store: the graph cache, where a backend keeps its kernels.

    Raises:
        OptionError: the name is unknown.
        BackendError: the backend cannot run here, and `strict` or its name forbids another one.
    """
    if name != "auto":
        return make_backend(name, report, store), None
    first, second = AUTO
    try:
        return make_backend(first, report, store), None
    except BackendError as error:
        if strict:
            raise
        return make_backend(second, report, store), f"{second} backend instead of {first}: {error}"


def make_backend(name: str, report: Report = silent, store: EntryStore | None = None) -> Backend:
    """The backend of this name.

    Args:
        name: a row of `BACKENDS`.
        report: is called with a line before long work.
        store: the graph cache, where a backend keeps its kernels.

    Raises:
        OptionError: the name is unknown.
        BackendError: the backend cannot run here.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
        known = ", ".join(["auto", *BACKENDS])
        raise OptionError(f"unknown backend {name!r}; {hint} one of {known}")
    return BACKENDS[name].make(report, store)


__all__ = [
    "AUTO",
    "BACKENDS",
    "PACKAGING",
    "Backend",
    "choose_backend",
    "first_choice",
    "make_backend",
    "settle_prefill",
]
