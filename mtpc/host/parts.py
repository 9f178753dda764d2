"""Compiled steps, and halves of steps, that are not yet bound to tensors.

Each has the `layout` of its buffers, and can be bound to any number of sets of tensors: its `bind`
gives a replay over tensors by buffer name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from mtpc.backends.base import Backend, Run
from mtpc.backends.package import Package, open_package
from mtpc.capture.graph import StepGraph, WeightTable, set_tensor
from mtpc.layout import Layout, Part, StepKey
from mtpc.program.binding import StepBinder, WeightSource
from mtpc.program.step_cache import CachedStep


@dataclass(frozen=True)
class GraphPart:
    """A graph after the passes; `bind` lowers it, because its backend captures addresses."""

    graph: StepGraph
    backend: Backend

    @property
    def layout(self) -> Layout:
        return self.graph.layout

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Replace the graph's own buffers by the tensors, lower it, and capture it."""
        own = self.graph.clone()
        for name in own.buffers():
            set_tensor(own.module, name, tensors[name])
        return self.backend.capture(self.backend.lower(own), own)


@dataclass(frozen=True)
class PackagePart:
    """A compiled package that only this process has, because there is no cache."""

    layout: Layout
    directory: TemporaryDirectory[str]
    package: Package
    weights: WeightTable

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Open the package over the tensors and the weights."""

        def tensor_of(name: str) -> Tensor:
            return tensors[name] if name in tensors else self.weights[name]

        sizes = {str(symbol): number for symbol, number in self.layout.sizes.items()}
        return open_package(Path(self.directory.name), self.package, tensor_of, sizes)


@dataclass(frozen=True)
class CachedPart:
    """A compiled package of the graph cache; parts with the same table share weights."""

    step: CachedStep
    weights: WeightTable
    source: WeightSource | None = None

    @property
    def layout(self) -> Layout:
        return self.step.layout

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Open the package, and read the weights that the table lacks."""
        return StepBinder(tensors, self.weights, self.source).bind(self.step).replay


Lowered = GraphPart | PackagePart | CachedPart
Parts = dict[tuple[StepKey, Part], Lowered]
"""Every graph of a hosted model."""
