"""A program: captured steps by key, over one set of shared buffers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mtpc.capture.graph import StepGraph
from mtpc.layout import SCRATCH_SLOT, Layout, StepKey
from mtpc.program.cost_entry import CostEntry
from mtpc.program.packed_results import HostCopies


@dataclass(frozen=True)
class CapturedStep:
    """One captured step.

    Attributes:
        key: phase, bucket and K.
        layout: its buffers.
        buffers: tensors of all its buffers by name; their addresses never change.
        replay: runs the step.
        build_s: seconds to trace, rewrite, lower and capture it, or to load it.
        graph: the lowered graph with its pass history; None if the step comes from the cache.
    """

    key: StepKey
    layout: Layout
    buffers: Mapping[str, Tensor]
    replay: Callable[[], None]
    build_s: float
    graph: StepGraph | None = None

    @cached_property
    def results(self) -> HostCopies:
        """Its results in the host's memory."""
        return HostCopies({name: self.buffers[name] for name in self.layout.results})


@dataclass
class Program:
    """All captured steps of a model over shared buffers.

    All replays and host writes go through it, and it counts them.

    Attributes:
        steps: captured steps by key.
        shared: tensors of state and caches that all steps use, by name.
        snapshots: tensors of the engine, to and from which it copies rows of `shared`.
        replays: number of replays by step.
        host_writes: number of buffer writes by the host.
        building: how far another process has built missing steps; "" if none are missing.
        fallbacks: why steps that were asked for will not come, once; part of `Stats.fallbacks`.
        arrived: steps that were bound meanwhile, each time with the K to choose from now on.
        identity: of the weights, the options and the code, on which the content of caches depends;
            "" if it is not known.
        costs: keeps what the steps cost for later runs; None if nothing is kept.
    """

    steps: dict[StepKey, CapturedStep]
    shared: Mapping[str, Tensor]
    snapshots: list[Tensor] = field(default_factory=list)
    replays: Counter[StepKey] = field(default_factory=Counter)
    host_writes: int = 0
    building: str = ""
    fallbacks: Counter[str] = field(default_factory=Counter)
    arrived: deque[tuple[tuple[int, ...], list[CapturedStep]]] = field(default_factory=deque)
    identity: str = ""
    costs: CostEntry | None = None
    _rows: dict[StepKey, list[int]] = field(default_factory=dict, repr=False)

    @property
    def layout(self) -> Layout:
        """Buffers of one of the steps; `state.*` and `kv.*` are those of all."""
        return next(iter(self.steps.values())).layout

    @property
    def tiers(self) -> tuple[int, ...]:
        """The numbers of drafts that have decode steps, ascending."""
        return tuple(sorted({k.spec_tokens for k in self.steps if k.phase == "decode"}))

    @property
    def ready(self) -> tuple[int, ...]:
        """The K to choose from once all steps that arrived are taken over; () if none wait."""
        waiting = list(self.arrived)
        return waiting[-1][0] if waiting else ()

    def take(self) -> tuple[int, ...]:
        """Take over the steps that arrived first; returns the K to choose from now on."""
        tiers, steps = self.arrived.popleft()
        self.steps |= {step.key: step for step in steps}
        return tiers

    def bucket_for(self, num_reqs: int) -> int:
        """The smallest decode bucket, in requests, that holds `num_reqs`."""
        sizes = {k.bucket.num_reqs for k in self.steps if k.phase == "decode"}
        return min(size for size in sizes if size >= num_reqs)

    def prefill_key(self) -> StepKey:
        """Key of the prefill step."""
        return next(k for k in self.steps if k.phase == "prefill")

    @property
    def max_reqs(self) -> int:
        """Number of requests in the largest decode bucket."""
        return max(k.bucket.num_reqs for k in self.steps if k.phase == "decode")

    def write(self, tensor: Tensor, value: Tensor | int) -> None:
        """Write from the host into a buffer, or into a view of its rows.

        On a device the write runs after the work already launched there. It comes from pinned
        memory, so the host does not wait.

        Args:
            tensor: the buffer or view.
            value: a number that fills it, or a CPU tensor for its first rows; the other rows stay.
        """
        self.host_writes += 1
        if isinstance(value, Tensor):
            value = value.to(tensor.dtype)
            value = value.pin_memory() if tensor.is_cuda else value
            tensor[: value.shape[0]].copy_(value, non_blocking=True)
        else:
            tensor.fill_(value)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy rows of a buffer to a snapshot, or back, after the work that is launched already."""
        to.copy_(source)

    def wait(self, wait: Callable[[], None]) -> None:
        """Wait for a step.

        Args:
            wait: returns when the step is done.
        """
        wait()

    def set_batch(self, key: StepKey, slots: list[int]) -> None:
        """Point the rows of a step at request slots; writes only if they changed."""
        indices = self.steps[key].buffers["batch.state_indices"]
        padding = [SCRATCH_SLOT] * (indices.shape[0] - len(slots))
        wanted = slots + padding
        # The host keeps a copy of the rows, because reading them would wait for the device.
        if self._rows.get(key) != wanted:
            self._rows.pop(key, None)  # If the write fails, the rows are unknown.
            self.write(indices, torch.tensor(wanted, dtype=indices.dtype))
            self._rows[key] = wanted

    def forget_batches(self) -> None:
        """Make the next `set_batch` of each step write; for code that wrote the rows elsewhere."""
        self._rows.clear()

    def run(self, key: StepKey) -> Mapping[str, Tensor]:
        """Replay one step; returns its buffers, including the results."""
        step = self.steps[key]
        step.replay()
        self.replays[key] += 1
        return step.buffers
