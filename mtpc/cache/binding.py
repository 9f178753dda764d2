"""Giving cached steps their tensors: one set of state and of weights for all steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from mtpc.backends.package import open_package
from mtpc.cache.steps import CONSTANTS, CachedStep
from mtpc.capture.graph import WeightTable
from mtpc.capture.program import CapturedStep
from mtpc.checkpoint import Checkpoint
from mtpc.recipes import make, names


@dataclass
class StepBinder:
    """Binds packages to tensors.

    Attributes:
        shared: state and caches, by name.
        weights: weights at hand; those read or made here are added.
        checkpoint: where other weights are read from; None if all are at hand.
    """

    shared: Mapping[str, Tensor]
    weights: WeightTable
    checkpoint: Checkpoint | None = None

    def bind(self, step: CachedStep, own: dict[str, Tensor] | None = None) -> CapturedStep:
        """A step ready to run.

        Args:
            step: from the cache.
            own: buffers that are neither state nor caches; those that are missing are allocated
                and added, so that the halves of a split step can be given one set.
        """
        start = time.perf_counter()
        own = {} if own is None else own
        layout = step.record.layout()
        for name in layout:
            if name not in self.shared and name not in own:
                own[name] = layout.allocate(name)
        buffers = {**self.shared, **own}

        def tensor_of(name: str) -> Tensor:
            if name not in buffers and name not in self.weights:
                self._add_weight(name, step)
            return buffers[name] if name in buffers else self.weights[name]

        replay = open_package(step.directory, step.record.package, tensor_of)
        seconds = time.perf_counter() - start
        return CapturedStep(step.record.step, layout, buffers, replay, seconds)

    def _add_weight(self, name: str, step: CachedStep) -> None:
        """Make a weight that a step takes: derived, stored in the checkpoint, or a constant."""
        record = step.record
        if name in record.derived:
            for part in names(record.derived[name]):
                if part not in self.weights:
                    self._add_weight(part, step)
            self.weights.derive(name, record.derived[name])
        elif name in record.stored and self.checkpoint is not None:
            made = make(record.stored[name], self.checkpoint.tensor)
            self.weights.bind(name, made.to(getattr(torch, record.dtypes[name])))
        else:
            with safe_open(step.directory / CONSTANTS, framework="pt") as file:
                self.weights.bind(name, file.get_tensor(name))
