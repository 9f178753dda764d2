"""Backends: how a StepGraph runs on a machine. A backend is one file and one row of `BACKENDS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mtpc.backends.base import Backend
from mtpc.errors import BackendError, OptionError
from mtpc.layout.progress import Report, silent
from mtpc.plan import ANY_DTYPE, Facts, no_invariance
from mtpc.store.entries import EntryStore


def _cpu(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.cpu.backend import CpuBackend

    return CpuBackend(report, store)


def _cuda(report: Report, store: EntryStore | None, batch_invariant: bool = False) -> Backend:
    from mtpc.backends.cuda import open_cuda

    return open_cuda(report, store, batch_invariant)


def _eager(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.eager import EagerBackend

    return EagerBackend()


def _null(report: Report, store: EntryStore | None) -> Backend:
    from mtpc.backends.null import NullDevice

    return NullDevice()


@dataclass(frozen=True)
class Row:
    """What is known about a backend before it is made.

    Attributes:
        make: makes it from a reporter and the store that keeps its kernels.
        make_invariant: the same with the option `batch_invariant`; None if it lacks the option.
        makes_files: as that of the backend, which need not be imported for it.
        has_kernels: whether it takes kernels from the graph cache.
        skips_idle_rows: whether its kernels leave out unused rows of a prefill step.
        is_gpu: whether it runs on GPUs.
    """

    make: Callable[[Report, EntryStore | None], Backend]
    make_invariant: Callable[[Report, EntryStore | None], Backend] | None = None
    makes_files: bool = False
    has_kernels: bool = False
    skips_idle_rows: bool = False
    is_gpu: bool = False


BACKENDS = {
    "cpu": Row(_cpu, _cpu, makes_files=True, has_kernels=True, skips_idle_rows=True),
    "cuda": Row(_cuda, partial(_cuda, batch_invariant=True), has_kernels=True, is_gpu=True),
    "eager": Row(_eager),
    "null": Row(_null),
}
INVARIANT_DTYPE = "bfloat16"
"""The dtype in which the cpu backend's steps are batch-invariant."""
AUTO = ("cpu", "eager")
"""What the option's value "auto" stands for: the first of these that works here."""
PACKAGING = next(name for name, row in BACKENDS.items() if row.makes_files)
"""The backend that compiles ahead of time."""


def first_choice(name: str) -> Row | None:
    """The row of an option's value, "auto" included; None for an unknown name."""
    return BACKENDS.get(AUTO[0] if name == "auto" else name)


def backend_facts(name: str) -> Facts:
    """What a plan follows from, of the first choice for an option's value."""
    row = first_choice(name)
    if row is None:
        return Facts()  # Making the backend says that there is none of this name.
    invariant = INVARIANT_DTYPE if row.make_invariant is not None else ""
    return Facts(
        backend=AUTO[0] if name == "auto" else name,
        is_gpu=row.is_gpu,
        skips_idle_rows=row.skips_idle_rows,
        invariant_dtype=ANY_DTYPE if row.is_gpu else invariant,
    )


def choose_backend(
    name: str,
    strict: bool,
    report: Report,
    store: EntryStore | None = None,
    batch_invariant: bool = False,
) -> tuple[Backend, str | None]:
    """The backend for a value of the option `backend`, and why it is not the first choice, or None.
    "auto" is the first of `AUTO` that works here; if `strict`, it must not fall back. For the other
    arguments see `make_backend`.

    Raises:
        OptionError: the name is unknown, or the backend is never batch-invariant.
        BackendError: the backend cannot run here, and `strict` or its name forbids another one.
    """
    if name != "auto":
        return make_backend(name, report, store, batch_invariant), None
    first, second = AUTO
    try:
        return make_backend(first, report, store), None
    except BackendError as error:
        if strict or batch_invariant:
            raise
        return make_backend(second, report, store), f"{second} backend instead of {first}: {error}"


def make_backend(
    name: str,
    report: Report = silent,
    store: EntryStore | None = None,
    batch_invariant: bool = False,
) -> Backend:
    """The backend of this name of `BACKENDS`. It calls `report` with a line before long work, and
    keeps its kernels in `store`, the graph cache.

    Raises:
        OptionError: the name is unknown, or the backend is never batch-invariant.
        BackendError: the backend cannot run here.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
        known = ", ".join(["auto", *BACKENDS])
        raise OptionError(f"unknown backend {name!r}; {hint} one of {known}")
    row = BACKENDS[name]
    make = row.make_invariant if batch_invariant else row.make
    if make is None:
        raise no_invariance(name)
    return make(report, store)
