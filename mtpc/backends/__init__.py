"""Backends: where a StepGraph meets a machine. A backend is one file and one row here."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from mtpc.backends.base import Backend, Report
from mtpc.errors import OptionError


def _cpu(report: Report) -> Backend:
    from mtpc.backends.cpu import CpuBackend

    return CpuBackend(report)


def _eager(report: Report) -> Backend:
    from mtpc.backends.eager import EagerBackend

    return EagerBackend()


def _null(report: Report) -> Backend:
    from mtpc.backends.null import NullDevice

    return NullDevice()


BACKENDS: dict[str, Callable[[Report], Backend]] = {"cpu": _cpu, "eager": _eager, "null": _null}


def make_backend(name: str, report: Report = lambda line: None) -> Backend:
    """The backend of this name; "auto" is the fastest that exists for this machine (cpu).

    Raises:
        OptionError: unknown name.
        BackendError: it cannot run here.
    """
    if name == "auto":
        name = "cpu"
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"unknown backend {name!r}; {hint}backends: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](report)


__all__ = ["BACKENDS", "Backend", "make_backend"]
