"""Backends: how a StepGraph runs on a machine. A backend is one file and one row of `BACKENDS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from mtpc.backends.base import Backend, Report
from mtpc.errors import BackendError, OptionError
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


Maker = Callable[[Report, EntryStore | None], Backend]
BACKENDS: dict[str, Maker] = {"cpu": _cpu, "cuda": _cuda, "eager": _eager, "null": _null}


def choose_backend(
    name: str, strict: bool, report: Report, store: EntryStore | None = None
) -> tuple[Backend, str | None]:
    """The backend for a value of the option `backend`, and why it is not the first choice.

    The reason is None if it is the first choice.

    Args:
        name: a backend, or "auto": cpu, or eager if the cpu backend cannot run.
        strict: whether "auto" must not fall back to eager.
        report: is called with a line before long work.
        store: the graph cache, where a backend keeps its kernels.

    Raises:
        OptionError: the name is unknown.
        BackendError: the backend cannot run here, and `strict` or its name forbids another one.
    """
    if name != "auto":
        return make_backend(name, report, store), None
    try:
        return make_backend("cpu", report, store), None
    except BackendError as error:
        if strict:
            raise
        return make_backend("eager", report, store), f"eager backend instead of cpu: {error}"


def make_backend(
    name: str, report: Report = lambda line: None, store: EntryStore | None = None
) -> Backend:
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
    return BACKENDS[name](report, store)


__all__ = ["BACKENDS", "Backend", "choose_backend", "make_backend"]
