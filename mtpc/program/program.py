"""A program: captured steps by key, over one set of shared buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpc.capture.graph import StepGraph
from mtpc.layout import SCRATCH_SLOT, Layout, StepKey


@dataclass(frozen=True)
class CapturedStep:
    """One captured iteration.

    Attributes:
        key: phase, bucket and K.
        layout: its buffers.
        buffers: all its tensors by name; addresses never change.
        replay: runs the iteration.
        build_s: seconds to trace, rewrite, lower and capture it, or to load it.
        graph: what was lowered, with its pass history; None where it came from the cache.
    """

    key: StepKey
    layout: Layout
    buffers: Mapping[str, Tensor]
    replay: Callable[[], None]
    build_s: float
    graph: StepGraph | None = None


@dataclass
class Program:
    """All captured steps of a model, and the only place that counts replays and host writes.

    Attributes:
        steps: captured steps by key.
        shared: state and cache tensors that all steps use, by name.
        replays: how often each step ran.
        host_writes: buffer writes by the host.
    """

    steps: Mapping[StepKey, CapturedStep]
    shared: Mapping[str, Tensor]
    replays: Counter[StepKey] = field(default_factory=Counter)
    host_writes: int = 0
    _rows: dict[StepKey, list[int]] = field(default_factory=dict, repr=False)

    def bucket_for(self, num_reqs: int) -> int:
        """Requests of the smallest decode steps that hold `num_reqs`."""
        sizes = {k.bucket.num_reqs for k in self.steps if k.phase == "decode"}
        return min(size for size in sizes if size >= num_reqs)

    def prefill_key(self) -> StepKey:
        """The prefill step."""
        return next(k for k in self.steps if k.phase == "prefill")

    @property
    def max_reqs(self) -> int:
        """Requests the largest decode step holds."""
        return max(k.bucket.num_reqs for k in self.steps if k.phase == "decode")

    def write(self, tensor: Tensor, value: Tensor | int) -> None:
        """One host write into a buffer, or into a view of its rows.

        A `value` tensor, on the CPU, shorter than `tensor` leaves the rest at what it was. To a
        device it goes behind what was launched there, from pinned memory: the host does not wait.
        """
        self.host_writes += 1
        if isinstance(value, Tensor):
            value = value.to(tensor.dtype)
            value = value.pin_memory() if tensor.is_cuda else value
            tensor[: value.shape[0]].copy_(value, non_blocking=True)
        else:
            tensor.fill_(value)

    def set_batch(self, key: StepKey, slots: list[int]) -> None:
        """Point a step's rows at request slots; nothing is written where nothing changed."""
        indices = self.steps[key].buffers["batch.state_indices"]
        padding = [SCRATCH_SLOT] * (indices.shape[0] - len(slots))
        wanted = slots + padding
        if self._rows.get(key) != wanted:  # Known, for reading a device would wait for it.
            self._rows.pop(key, None)  # Should the write fail, nothing is.
            self.write(indices, torch.tensor(wanted, dtype=indices.dtype))
            self._rows[key] = wanted

    def forget_batches(self) -> None:
        """For who writes `batch.state_indices` otherwise: the next `set_batch` writes all."""
        self._rows.clear()

    def run(self, key: StepKey) -> Mapping[str, Tensor]:
        """One iteration; returns the step's buffers, results among them."""
        step = self.steps[key]
        step.replay()
        self.replays[key] += 1
        return step.buffers
