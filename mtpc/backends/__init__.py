"""Backends: how a StepGraph runs on a machine. A backend is one file and one row of `BACKENDS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mtpc.backends.base import Backend
from mtpc.config import CompileOptions
from mtpc.errors import BackendError, OptionError
from mtpc.layout.progress import Report, silent
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
        has_packages: whether its steps are files, which the graph cache keeps.
        has_kernels: whether it takes kernels from the graph cache.
        skips_idle_rows: whether its kernels leave out unused rows of a prefill step.
        is_gpu: whether it runs on GPUs.
    """

    make: Callable[[Report, EntryStore | None], Backend]
    make_invariant: Callable[[Report, EntryStore | None], Backend] | None = None
    has_packages: bool = False
    has_kernels: bool = False
    skips_idle_rows: bool = False
    is_gpu: bool = False


BACKENDS = {
    "cpu": Row(_cpu, _cpu, has_packages=True, has_kernels=True, skips_idle_rows=True),
    "cuda": Row(_cuda, partial(_cuda, batch_invariant=True), has_kernels=True, is_gpu=True),
    "eager": Row(_eager),
    "null": Row(_null),
}
INVARIANT_DTYPE = "bfloat16"
"""The dtype in which the cpu backend's steps are batch-invariant."""
AUTO = ("cpu", "eager")
"""What the option's value "auto" stands for: the first of these that works here."""
PACKAGING = next(name for name, row in BACKENDS.items() if row.has_packages)
"""The backend that compiles ahead of time."""


def first_choice(name: str) -> Row | None:
    """The row of an option's value, "auto" included; None for an unknown name."""
    return BACKENDS.get(AUTO[0] if name == "auto" else name)


def settle_prefill(options: CompileOptions, dtype: str | None) -> CompileOptions:
    """Settle the size of prompt chunks and `batch_invariant`, given the dtype of stored weights.

    Raises:
        OptionError: `batch_invariant` is True, and the backend has no such steps of this dtype.
    """
    row = first_choice(options.backend)
    if options.batch_invariant and row is not None and not row.is_gpu:
        options = _without_invariance(options, row, options.dtype or dtype)
    if row is not None and row.is_gpu:
        return options.for_gpu()
    return options.for_weights(dtype, row is not None and row.skips_idle_rows)


def _without_invariance(options: CompileOptions, row: Row, dtype: str | None) -> CompileOptions:
    """Options for a backend whose steps are batch-invariant anyway; no other one may run."""
    if row.make_invariant is None:
        raise _no_invariance(options.backend)
    if dtype != INVARIANT_DTYPE:
        raise OptionError(
            f"batch_invariant is True with dtype {dtype!r} on the cpu backend, whose steps are "
            f"batch-invariant in {INVARIANT_DTYPE} only; change one of them"
        )
    name = AUTO[0] if options.backend == "auto" else options.backend
    return replace(options, backend=name, batch_invariant=False)


def _no_invariance(name: str) -> OptionError:
    return OptionError(
        f"batch_invariant is True with backend {name!r}, whose products are PyTorch's; expected "
        "'cuda' or 'cpu'"
    )


def choose_backend(
    name: str,
    strict: bool,
    report: Report,
    store: EntryStore | None = None,
    batch_invariant: bool = False,
) -> tuple[Backend, str | None]:
    """The backend for a value of the option `backend`, and why it is not the first choice.

    The reason is None if it is the first choice.

    Args:
        name: a backend, or "auto": the first of `AUTO` that works here.
        strict: whether "auto" must not fall back.
        report: is called with a line before long work.
        store: the graph cache, where a backend keeps its kernels.
        batch_invariant: as the option.

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
    """The backend of this name.

    Args:
        name: a row of `BACKENDS`.
        report: is called with a line before long work.
        store: the graph cache, where a backend keeps its kernels.
        batch_invariant: as the option.

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
        raise _no_invariance(name)
    return make(report, store)
