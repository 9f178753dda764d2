"""Giving cached steps their tensors: one set of state and of weights for all steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from mtpc.backends.package import open_package
from mtpc.capture.graph import WeightTable
from mtpc.program.program import CapturedStep
from mtpc.program.step_cache import CONSTANTS, CachedStep
from mtpc.program.step_record import StepRecord
from mtpc.weights.checkpoint import Checkpoint, is_finite, refuse_not_finite
from mtpc.weights.packing import Fill
from mtpc.weights.recipes import make, names, substitute


@dataclass
class StepBinder:
    """Binds packages to tensors.

    Attributes:
        shared: state and caches, by name.
        weights: weights at hand; those read or made here are added.
        source: where weights are read from that are not at hand; None if all are.
    """

    shared: Mapping[str, Tensor]
    weights: WeightTable
    source: WeightSource | None = None

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
        """Make a weight that a step takes: stored, derived of stored ones, or a constant."""
        record = step.record
        base = names(record.derived.get(name, name))
        if self.source is not None and all(part in record.stored for part in base):
            self.weights.bind(name, self.source.weight(name, record))
        elif name in record.derived:
            self.weights.derive(name, record.derived[name])
        else:
            with safe_open(step.directory / CONSTANTS, framework="pt") as file:
                self.weights.bind(name, file.get_tensor(name))


class WeightSource:
    """Weights of steps, made of a checkpoint's tensors and of nothing else.

    What is packed or joined is made straight from the mapped files: plain weights that no step
    takes are never in memory.

    Args:
        checkpoint: where they are stored.
        fill: how weights are packed.
    """

    def __init__(self, checkpoint: Checkpoint, fill: Fill):
        self._checkpoint, self._fill = checkpoint, fill
        self._finite: dict[str, bool] = {}

    def weight(self, name: str, record: StepRecord) -> Tensor:
        """One weight that a record explains."""
        recipe = record.derived.get(name, name)
        tensors = {
            stored: self._read(stored, getattr(torch, record.dtypes[part]))
            for part in names(recipe)
            for stored in names(record.stored[part])
        }
        made_of = substitute(recipe, record.stored.__getitem__)
        made = make(made_of, tensors.__getitem__, self._fill)
        if not isinstance(made_of, str):  # A copy: its parts have been read for the last time.
            for stored in tensors:
                self._checkpoint.release(stored)
        return made

    def check(self) -> None:
        """Refuse what has been read so far if it is no use.

        Raises:
            CheckpointError: tensors hold NaN or infinity.
        """
        bad = [name for name, finite in self._finite.items() if not finite]
        refuse_not_finite(bad, str(self._checkpoint.directory))

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor; checked now, because soon after it is packed out of the caches."""
        tensor = self._checkpoint.tensor(name).to(dtype)
        if name not in self._finite:
            self._finite[name] = is_finite(tensor)
        return tensor
