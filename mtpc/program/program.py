"""A program: captured steps by key, over one set of shared buffers; and what it keeps of its runs.

A step's results (`BufferSpec.is_result`) are side by side in one memory, so that one copy brings
them to the host.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mtpc.capture.graph import StepGraph
from mtpc.errors import CacheError
from mtpc.layout import SCRATCH_SLOT, Layout, StepKey
from mtpc.program.step_cache import StepCache
from mtpc.store.key import digest
from mtpc.store.lookup import find, keep
from mtpc.store.machine import cpu_name


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

    def close(self) -> None:
        """End what others do for the program: ranks that follow it, where there are some."""

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


_ALIGNMENT = 16
"""Bytes that kernels read or write at once, from the beginning of a tensor."""


def allocate_results(
    layout: Layout, names: Iterable[str], device: torch.device
) -> dict[str, Tensor]:
    """Buffers that are side by side in one memory, filled with their padding, by name."""
    held = {name: layout.allocate(name, device) for name in names}
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in held.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    return {
        name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (name, tensor), part in zip(held.items(), memory.split(sizes), strict=True)
    }


class HostCopies:
    """The results of a step in the host's memory, which is pinned if they come from a device.

    There are two copies, taken in turns: with `async_scheduling` the host reads a step's results
    after the launch of the next step, and before the launch of the one after that.

    Args:
        results: a step's, by name, side by side as `allocate_results` has them.
    """

    def __init__(self, results: Mapping[str, Tensor]):
        self._source = _whole(next(iter(results.values())))
        self._turns = itertools.cycle([self._place(results) for _ in range(2)])

    def _place(self, results: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """New memory for a copy; and the results in it."""
        source = self._source
        copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        return copy, {name: _like(tensor, copy) for name, tensor in results.items()}

    def take(self) -> Mapping[str, Tensor]:
        """Copy the results behind the work that is launched already; the host does not wait.

        Returns:
            The results by name. The call after the next one overwrites them.
        """
        copy, results = next(self._turns)
        copy.copy_(self._source, non_blocking=True)
        return results


def _whole(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a part of, as bytes."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The part of the packed bytes that holds a result."""
    begin = tensor.storage_offset() * tensor.itemsize
    return packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


FILE = "costs.json"


class CostEntry:
    """The costs of one program's steps on this machine.

    Args:
        cache: holds the steps. If it is frozen, nothing is written.
    """

    def __init__(self, cache: StepCache):
        self._store, self._frozen = cache.store, cache.plan.frozen
        machine = {"machine.cpu": cpu_name(), "machine.threads": str(torch.get_num_threads())}
        self._fields = {**cache.program, **machine, "kind": "costs"}

    def read(self, notes: Counter[str]) -> bytes | None:
        """The costs; None if there are none, or if they are damaged, which `notes` then counts."""
        try:
            entry = find(self._store, self._fields)
            return None if entry is None else entry.read(FILE)
        except CacheError as error:
            notes[f"costs of earlier runs were not used: {error}"] += 1
            return None

    def write(self, data: bytes, notes: Counter[str]) -> None:
        """Keep costs in place of the earlier ones; `notes` counts why that failed."""
        if self._frozen:
            return
        try:
            with self._store.lock(digest(self._fields), lambda line: None):
                keep(self._store, self._fields, {FILE: data})
        except CacheError as error:
            notes[f"costs of steps were not kept: {error}"] += 1
