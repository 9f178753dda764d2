"""The machine of benchmarks.gpu behind one interface: a GPU, or the null device for a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.gpu.profile import DeviceProfiler, OperatorProfiler, Profiler
from mtpc.backends.base import Run
from mtpc.backends.cuda import CudaBackend, lower_by_inductor, open_cuda
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import Graphs, TorchGraphs
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.environment import cache_directory
from mtpc.store.entries import EntryStore

COPY_BYTES = 2 << 30
"""Bytes of the copied buffer; far more than the caches hold."""
_PASSES = 7


class Clock(Protocol):
    """Measures the device's time of the work that it runs."""

    def run(self, work: Run) -> None:
        """Start work; on a device, without waiting for it."""
        ...

    def read(self) -> list[float]:
        """Seconds of each run so far; waits for the last."""
        ...


class DirectGraphs:
    """`graphs.Graphs` that captures nothing: a replay runs the step."""

    def warm_up(self, run: Run) -> None:
        """Run."""
        run()

    def record(self, run: Run) -> Run:
        """The run."""
        return run

    def pool_bytes(self) -> int:
        """There is no pool."""
        return 0

    def free_bytes(self) -> int | None:
        """Nobody counts."""
        return None


class Machine:
    """The operations that the benchmark needs of a device; here the null device, without a GPU.

    It runs every part of the benchmark, without meaningful times.

    Attributes:
        name: name of the device.
        device: torch's name of the device.
        is_dry: whether this is a dry run, whose times mean nothing.
    """

    name, device, is_dry = "null device", "cpu", True

    def backend(self, batch_invariant: bool = False) -> CudaBackend:
        """The cuda backend on graphs, with a memory pool of its own; here with the references."""
        return CudaBackend(NullGraphs(), self.lower, (), device="cpu")

    def reference(self) -> CudaBackend:
        """A backend with the reference operators, neither compiled nor captured."""
        return CudaBackend(DirectGraphs(), self.lower, (), device="cpu")

    def graphs(self) -> Graphs:
        """What captures, with a memory pool of its own."""
        return NullGraphs()

    def lower(self, graph: StepGraph) -> Run:
        """What compiles; here the eager callable."""
        return EagerBackend().lower(graph)

    def clock(self) -> Clock:
        """A new clock; here the host's."""
        return _HostClock()

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a plain copy; here over a small buffer."""
        return _copy_bandwidth(1 << 20, _HostClock())

    def direct(self) -> CudaBackend:
        """A backend that launches kernels one by one, for steps that are not measured."""
        return self.reference()

    def profiler(self) -> Profiler:
        """A new profiler; here of operators."""
        return OperatorProfiler()


class GpuMachine(Machine):
    """This machine's GPU.

    Raises:
        BackendError: there is none that torch can use, or no Triton.
    """

    device, is_dry = "cuda", False

    def __init__(self) -> None:
        open_cuda()  # Says what is missing.
        self.name = torch.cuda.get_device_name()
        self._store = EntryStore(cache_directory())

    def backend(self, batch_invariant: bool = False) -> CudaBackend:
        """As `backend="cuda"` opens it: with the autotune table of the user's cache."""
        return open_cuda(store=self._store, batch_invariant=batch_invariant)

    def reference(self) -> CudaBackend:
        """PyTorch's own kernels, op by op."""
        return CudaBackend(DirectGraphs(), EagerBackend().lower, ())

    def graphs(self) -> Graphs:
        """CUDA or HIP graphs."""
        return TorchGraphs(torch.device("cuda", torch.cuda.current_device()))

    def lower(self, graph: StepGraph) -> Run:
        """Inductor."""
        return lower_by_inductor(graph)

    def clock(self) -> Clock:
        """The device's events."""
        return _EventClock()

    def copy_bandwidth(self) -> float:
        """Of the device's memory."""
        return _copy_bandwidth(COPY_BYTES, _EventClock())

    def direct(self) -> CudaBackend:
        """Without Inductor, tuning or capture."""
        from mtpc.backends.aiter import aiter_bindings
        from mtpc.backends.triton_kernels import triton_bindings

        # As the measured step: aiter's kernels read the same weights in an order of their own.
        theirs = aiter_bindings().bindings if torch.version.hip else ()
        bindings = (*theirs, *triton_bindings())
        return CudaBackend(DirectGraphs(), EagerBackend().lower, bindings)

    def profiler(self) -> Profiler:
        """Of what ran on the device, copies and fills included."""
        return DeviceProfiler()


class _HostClock:
    def __init__(self) -> None:
        self._seconds: list[float] = []

    def run(self, work: Run) -> None:
        start = time.perf_counter()
        work()
        self._seconds.append(time.perf_counter() - start)

    def read(self) -> list[float]:
        return list(self._seconds)


class _EventClock:
    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    def run(self, work: Run) -> None:
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        pair[0].record()
        work()
        pair[1].record()
        self._pairs.append((pair[0], pair[1]))

    def read(self) -> list[float]:
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in self._pairs]


def _copy_bandwidth(num_bytes: int, clock: Clock) -> float:
    device = "cuda" if isinstance(clock, _EventClock) else "cpu"
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    for _ in range(_PASSES):
        clock.run(_copy(source, target))
    return 2 * source.nbytes / min(clock.read())


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        target.copy_(source)

    return run
