"""The interface of backends."""

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
"""Runs one step over the buffers that were bound at lowering."""


class Backend(Protocol):
    """Lowers step graphs to callables and captures them.

    Attributes:
        name: value of the option `backend`.
        enables: names of the passes with the policy `backend` that this backend has kernels for.
        device: torch's name of the device where the model and its buffers must be.
        notes: lines on what runs in another way than expected -> count; part of `Stats.fallbacks`.
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
        """Passes that replace reference ops by this backend's kernels; they run last."""
        ...

    def lower(self, graph: StepGraph) -> Run:
        """Compile a flat, verified graph.

        Raises:
            BackendError: the backend cannot compile the graph; the message says why.
        """
        ...

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Turn a lowered step into a replay: fixed work on fixed addresses.

        Raises:
            CaptureError: the step does something that a device graph cannot repeat.
        """
        ...
