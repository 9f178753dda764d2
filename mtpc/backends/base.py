"""The seam between a StepGraph and a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mtpc.capture.graph import StepGraph

if TYPE_CHECKING:
    from mtpc.backends.package import Package
    from mtpc.passes.base import Pass

Run = Callable[[], None]
"""One iteration over the buffers bound at lowering; takes and returns nothing."""
Report = Callable[[str], None]
"""Receives a line on what is being done."""


class Backend(Protocol):
    """Lowers step graphs to callables and captures them.

    Attributes:
        name: as in the option `backend`.
        enables: names of the passes with the policy `backend` that this backend has kernels for.
        device: where the model and its buffers must be, as torch names it.
        notes: what runs otherwise than one would expect, counted; `Stats.fallbacks` in the end.
    """

    name: str
    enables: tuple[str, ...]
    device: str
    notes: Counter[str]

    @property
    def package(self) -> Callable[[StepGraph, Path], Package] | None:
        """Compiles a graph to files in a directory; None where steps live in this process only."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes left for the KV pool; None where the device's memory is not planned ahead."""
        ...

    def legalise(self) -> tuple[Pass, ...]:
        """Passes that rewrite to this backend's op table; they end the pipeline."""
        ...

    def lower(self, graph: StepGraph) -> Run:
        """Compile a flat, verified graph.

        Raises:
            BackendError: the graph cannot be compiled here; the message says why.
        """
        ...

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Turn a lowered step into a replay of fixed work on fixed addresses.

        Raises:
            CaptureError: the step does something that a device graph would freeze.
        """
        ...
