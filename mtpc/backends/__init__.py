"""Backends: where a StepGraph meets a machine. A backend is one file and one row here."""

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
    """The backend of an option's value, and why it is not the first choice (None if it is).

    Args:
        name: a backend, or "auto": cpu, or eager where the cpu backend cannot run.
        strict: refuse to fall back.
        report: hears of long work.
        store: the graph cache, for what a backend itself has to build.

    Raises:
        OptionError: unknown name.
        BackendError: it cannot run here (with `strict`, or where it was asked for by name).
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

    Raises:
        OptionError: unknown name.
        BackendError: it cannot run here.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"unknown backend {name!r}; {hint}backends: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](report, store)


__all__ = ["BACKENDS", "Backend", "choose_backend", "make_backend"]
