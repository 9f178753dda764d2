"""Compiled halves and steps that are not bound to tensors yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from torch import Tensor

from mtpc.backends.base import Backend, Run
from mtpc.backends.package import Package, open_package
from mtpc.capture.graph import StepGraph, WeightTable, set_tensor
from mtpc.layout import Layout
from mtpc.program.binding import StepBinder, WeightSource
from mtpc.program.step_cache import CachedStep


class Lowered(Protocol):
    """What can be bound to a host's tensors, any number of times.

    Attributes:
        layout: its buffers.
    """

    @property
    def layout(self) -> Layout: ...

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """A replay over exactly these tensors, by buffer name."""
        ...


@dataclass(frozen=True)
class GraphPart:
    """A rewritten graph, lowered when its tensors are known: its backend captures addresses."""

    graph: StepGraph
    backend: Backend

    @property
    def layout(self) -> Layout:
        return self.graph.layout

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Put the tensors where the graph's own stood, lower and capture."""
        own = self.graph.clone()
        for name in own.buffers():
            set_tensor(own.module, name, tensors[name], buffer=True)
        return self.backend.capture(self.backend.lower(own), own)


@dataclass(frozen=True)
class PackagePart:
    """A package of this process, where there is no cache."""

    layout: Layout
    directory: TemporaryDirectory[str]
    package: Package
    weights: WeightTable

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Open it over tensors and weights."""

        def tensor_of(name: str) -> Tensor:
            return tensors[name] if name in tensors else self.weights[name]

        return open_package(Path(self.directory.name), self.package, tensor_of)


@dataclass(frozen=True)
class CachedPart:
    """A package of the graph cache; weights are shared by all that have the same table."""

    step: CachedStep
    weights: WeightTable
    source: WeightSource | None = None

    @property
    def layout(self) -> Layout:
        return self.step.record.layout()

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Open it, reading weights that are not at hand yet."""
        return StepBinder(tensors, self.weights, self.source).bind(self.step).replay
