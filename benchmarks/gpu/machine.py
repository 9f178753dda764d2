"""The machine of benchmarks.gpu behind one interface: a GPU, or the null device for a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.gpu.profile import DeviceProfiler, OperatorProfiler, Profiler
from mtpc.backends.base import Run
from mtpc.backends.cuda import CudaBackend, open_cuda
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import Graphs, TorchGraphs
from mtpc.backends.null import NullGraphs
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


@dataclass(frozen=True)
class Machine:
    """What the benchmark needs of a device; as a rule of the null device, without a GPU.

    That one runs every part of the benchmark with the reference operators, without meaningful
    times.

    Attributes:
        name: name of the device.
        device: torch's name of the device.
        is_dry: whether this is a dry run, whose times mean nothing.
        graphs: makes what captures, with a memory pool of its own.
        clock: makes a clock: the host's, or of the device's events.
        profiler: makes a profiler: of operators, or of what ran on the device.
        copy_bytes: of the buffer whose copy gives the bandwidth.
    """

    name: str = "null device"
    device: str = "cpu"
    is_dry: bool = True
    graphs: Callable[[], Graphs] = NullGraphs
    clock: Callable[[], Clock] = _HostClock
    profiler: Callable[[], Profiler] = OperatorProfiler
    copy_bytes: int = 1 << 20

    def backend(self, batch_invariant: bool = False) -> CudaBackend:
        """As `backend="cuda"` opens it, with the autotune table of the user's cache; of the null
        device with the references."""
        if self.is_dry:
            return CudaBackend(NullGraphs(), EagerBackend().lower, (), device="cpu")
        return open_cuda(store=EntryStore(cache_directory()), batch_invariant=batch_invariant)

    def reference(self) -> CudaBackend:
        """PyTorch's own kernels, neither compiled nor captured."""
        return CudaBackend(DirectGraphs(), EagerBackend().lower, (), device=self.device)

    def direct(self) -> CudaBackend:
        """What launches kernels one by one, without Inductor, tuning or capture, for steps that are
        not measured."""
        if self.is_dry:
            return self.reference()
        from mtpc.backends.aiter import aiter_bindings
        from mtpc.backends.triton_kernels import triton_bindings

        # As the measured step: aiter's kernels read the same weights in an order of their own.
        theirs = aiter_bindings().bindings if torch.version.hip else ()
        bindings = (*theirs, *triton_bindings())
        return CudaBackend(DirectGraphs(), EagerBackend().lower, bindings)

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a plain copy."""
        clock, source = self.clock(), torch.ones(self.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)

        for _ in range(_PASSES):
            clock.run(copy)
        return 2 * source.nbytes / min(clock.read())


def gpu_machine() -> Machine:
    """This machine's GPU.

    Raises:
        BackendError: there is none that torch can use, or no Triton.
    """
    open_cuda()  # Says what is missing.
    graphs = partial(TorchGraphs, torch.device("cuda", torch.cuda.current_device()))
    made = (graphs, _EventClock, DeviceProfiler)
    return Machine(torch.cuda.get_device_name(), "cuda", False, *made, COPY_BYTES)
