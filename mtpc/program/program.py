"""A program: captured steps by key, over one set of shared buffers; and what it keeps of its runs.

A step's results (`BufferSpec.is_result`) are side by side in one memory, so that one copy brings
them to the host.

`StepBinder` binds built steps to tensors, and `bind_program` makes a program of them. `HostNeed` is
the host's memory for that, planned before anything is built and again before anything is bound:

    weights that are packed or joined + KV pages and other state <= free memory

Weights that the kernels read as they are stored stay in the mapped files. They need no memory of
their own, because the system can drop and read them again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load
from torch import Tensor

from mtpc.backends.package import signature_bytes
from mtpc.environment import free_bytes
from mtpc.errors import CapacityError
from mtpc.layout import SCRATCH_SLOT, Layout, StepKey
from mtpc.layout.progress import Listener, Progress, left_at
from mtpc.layout.slot_state import snapshots_nbytes
from mtpc.layout.specs import is_buffer_name
from mtpc.plan import Plan
from mtpc.program.step_cache import CONSTANTS, CachedStep, Steps
from mtpc.weights.weights import Weights

if TYPE_CHECKING:
    from mtpc.capture.graph import StepGraph
    from mtpc.store.costs import CostEntry


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
        first = next(iter(results.values()))
        # All the memory that they are a part of, as bytes.
        source = first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        self._source, places = source, list[tuple[Tensor, dict[str, Tensor]]]()
        for _ in range(2):
            copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            places.append((copy, {name: _like(each, copy) for name, each in results.items()}))
        self._turns = itertools.cycle(places)

    def take(self) -> Mapping[str, Tensor]:
        """Copy the results behind the work that is launched already; the host does not wait.

        Returns:
            The results by name. The call after the next one overwrites them.
        """
        copy, results = next(self._turns)
        copy.copy_(self._source, non_blocking=True)
        return results


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The part of the packed bytes that holds a result."""
    begin = tensor.storage_offset() * tensor.itemsize
    return packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


_TELL_S = 0.5
"""Seconds between two reports while weights are read."""


@dataclass(frozen=True)
class BuiltSteps:
    """Steps that are built, and what they are bound to.

    Attributes:
        steps: by step and part, the largest first.
        weights: the program's weights, which are made when a step reads them.
        shared: tensors of state and caches; None if a program has to make its own.
        meet: called before a step runs for the first time: ranks compile at their own pace.
        early: bytes that this process has taken for weights that are not made yet.
    """

    steps: Steps
    weights: Weights
    shared: Mapping[str, Tensor] | None = None
    meet: Callable[[], object] = lambda: None
    early: int = 0


@dataclass
class StepBinder:
    """Binds steps to tensors.

    Attributes:
        built: the steps' weights.
        shared: tensors of state and caches by name.
        added: called with the name of each weight that the binder has added.
        begin: called with each stage that begins, where a step is lowered only now.
    """

    built: BuiltSteps
    shared: Mapping[str, Tensor]
    added: Callable[[str], None] = lambda name: None
    begin: Callable[[str], None] = lambda stage: None

    def bind(self, step: CachedStep, own: dict[str, Tensor] | None = None) -> CapturedStep:
        """Open a step over its tensors.

        Args:
            step: to open.
            own: buffers that only this step uses, by name. Missing ones are allocated and added, so
                that both halves of a split step can be bound to the same set.
        """
        start, weights = time.perf_counter(), self.built.weights
        own = {} if own is None else own
        layout = step.layout
        missing = [name for name in layout if name not in self.shared and name not in own]
        if missing:
            device = next(iter(self.shared.values())).device
            results = [name for name in missing if layout[name].is_result]
            own |= allocate_results(layout, results, device)
            own |= {n: layout.allocate(n, device) for n in missing if n not in results}
        buffers = {**self.shared, **own}

        def tensor_of(name: str) -> Tensor:
            if name in buffers:
                return buffers[name]
            is_new = not weights.is_made(name)
            if is_new and not weights.can_make(name):
                weights.bind(name, load(step.read(CONSTANTS))[name])
            value = weights.value(name)
            if is_new:
                self.added(name)
            return value

        weights.know(step.record.derived, step.record.stored, step.record.ends)
        opened = step.artifact.open(tensor_of, step.sizes, self._begin)
        seconds = time.perf_counter() - start
        return CapturedStep(step.record.step, layout, buffers, opened.run, seconds, opened.graph)

    def _begin(self, stage: str) -> None:
        if stage == "capture":
            self.built.meet()
        self.begin(stage)


def bind_program(
    built: BuiltSteps,
    listener: Listener = lambda progress: None,
    identity: str = "",
    costs: CostEntry | None = None,
) -> Program:
    """A program of whole steps.

    Args:
        built: the steps; those of a split step are no part of a program.
        listener: called at each step.
        identity: see `Program`.
        costs: see `Program`.
    """
    steps, weights, shared = built.steps, built.weights, built.shared
    layout = next(iter(steps.values())).layout
    if shared is None:
        shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    loading = _Loading(steps, weights, listener)
    binder = StepBinder(built, shared, loading.added, loading.begin)
    bound = {}
    needed = loading.total + sum(tensor.nbytes for tensor in shared.values())
    for step in steps.values():
        weights.know(step.record.derived, step.record.stored, step.record.ends)
    with weights.reading_ahead(loading.names, free_bytes(), needed):
        for done, ((key, _), step) in enumerate(steps.items()):
            loading.begins(key, done)
            bound[key] = binder.bind(step)
    return Program(bound, shared, identity=identity, costs=costs)


class _Loading:
    """Says which step is bound, and from time to time how much of all weights is there.

    Attributes:
        names: of the weights that are not there when binding begins, in the order of use.
        total: their bytes.
    """

    def __init__(self, steps: Steps, weights: Weights, listener: Listener):
        self._listener, self._start = listener, time.perf_counter()
        self._sizes = {
            name: signature_bytes(signature)
            for step in steps.values()
            for name, signature in step.record.package.tensors.items()
            if not is_buffer_name(name) and not weights.is_made(name)
        }
        self.names, self.total = tuple(self._sizes), sum(self._sizes.values())
        self._there, self._steps = 0, len(steps)
        self._told_s = 0.0

    def begins(self, key: StepKey, done: int) -> None:
        """A step is bound from now on."""
        self._key, self._done = key, done
        self._tell(time.perf_counter() - self._start)

    def begin(self, stage: str) -> None:
        """A stage of a step begins that is lowered only now."""
        self._tell(time.perf_counter() - self._start, stage)

    def added(self, name: str) -> None:
        """A weight is there."""
        self._there += self._sizes.get(name, 0)
        elapsed_s = time.perf_counter() - self._start
        if elapsed_s > self._told_s + _TELL_S:
            self._tell(elapsed_s)

    def _tell(self, elapsed_s: float, stage: str = "load") -> None:
        self._told_s = elapsed_s
        place = (self._key, self._done, self._steps, elapsed_s)
        fraction = self._there / self.total if self.total else self._done / self._steps
        self._listener(Progress(stage, *place, fraction, left_at(fraction, elapsed_s)))


ALLOWANCE = 256 << 20
"""Bytes for results between calls, and for the rows that are being packed."""


_GIB = 2**30


@dataclass(frozen=True)
class HostNeed:
    """Bytes that a program takes.

    Attributes:
        weights: copies of weights in the kernels' form.
        buffers: KV pages, other state and its snapshots; 0 where a host has them.
    """

    weights: int
    buffers: int

    def check(self, plan: Plan, free: int | None, early: int = 0) -> None:
        """Refuse a program that does not fit.

        Args:
            plan: as it is compiled.
            free: bytes that this process can still have; None if the system does not say.
            early: bytes that it has taken for its weights already.

        Raises:
            CapacityError: it needs more.
        """
        need = self.weights + self.buffers + ALLOWANCE
        if free is None or need <= (free := free + early):
            return
        advice = "run it on a larger machine, which can start from what `mtpc build` makes here"
        if self.weights + ALLOWANCE < free:
            advice = "lower max_len, batch_buckets, num_pages or snapshot_bytes"
        buckets = ",".join(map(str, plan.batch_buckets))
        raise CapacityError(
            f"the model does not fit this machine's memory: it needs {need / _GIB:.1f} GiB "
            f"({self.weights / _GIB:.1f} of weights, {self.buffers / _GIB:.1f} of KV pages and "
            f"other state for max_len {plan.max_len} and batch_buckets "
            f"{buckets}), and {free / _GIB:.1f} GiB are free; {advice}"
        )


def need_of_steps(steps: Steps, plan: Plan, owns_buffers: bool) -> HostNeed:
    """What compiled steps take, according to their records.

    Args:
        steps: all of one program.
        plan: of the program.
        owns_buffers: whether the program has its own state.
    """
    weights: dict[str, int] = {}
    for step in steps.values():
        record = step.record
        made = {n for n, recipe in record.stored.items() if not isinstance(recipe, str)}
        for name, signature in record.package.tensors.items():
            if name in record.derived or name in made:
                weights[name] = signature_bytes(signature)
    layouts = [step.layout for step in steps.values()]
    buffers = buffer_bytes(layouts, plan) if owns_buffers else 0
    return HostNeed(sum(weights.values()), buffers)


def buffer_bytes(layouts: Sequence[Layout], plan: Plan) -> int:
    """Bytes of the shared buffers and of their snapshots, once, and of each step's own."""
    shared: dict[str, int] = {}
    own = 0
    for layout in layouts:
        for name, spec in layout.items():
            if spec.shared:
                shared[name] = layout.nbytes(name)
            else:
                own += layout.nbytes(name)
    return own + sum(shared.values()) + snapshots_nbytes(layouts[0], plan)
