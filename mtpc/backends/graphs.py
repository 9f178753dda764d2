"""Capturing a lowered step as one device graph. CUDA and HIP have one interface in torch.

The order of things is here; what touches the device is behind `Graphs`, so that the same order is
tested on the null device, which refuses and freezes what a device would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.capture.graph import StepGraph
from mtpc.errors import CaptureError

WARM_UPS = 2
"""Runs before capture: the first compiles and loads kernels, which must not happen inside it."""


class Graphs(Protocol):
    """What capture needs of a device. All graphs of one object share one memory pool."""

    def warm_up(self, run: Run) -> None:
        """Run once on the capture stream, outside any graph, and wait for it."""
        ...

    def record(self, run: Run) -> Run:
        """Capture one run into the pool; returns the replay, on the caller's stream."""
        ...

    def pool_bytes(self) -> int:
        """Device memory that the process holds and cannot give back, the pool included."""
        ...

    def free_bytes(self) -> int | None:
        """Device memory that is still to be had; None where nobody counts it."""
        ...


class TorchGraphs:
    """`torch.cuda.CUDAGraph`, which is a HIP graph where torch is built for ROCm."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> None:
        """Once on the side stream: lazily made handles and workspaces then belong to it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()

    def record(self, run: Run) -> Run:
        """One graph. Work of other threads is theirs: only this thread's mistakes end capture."""
        graph = torch.cuda.CUDAGraph()
        options: dict[str, Any] = dict(pool=self._pool, stream=self._stream)
        first: Exception | None = None
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                try:
                    run()
                except Exception as error:
                    first = error  # Ending the broken capture raises another over it.
                    raise
        except Exception as error:
            cause = first or error
            if not isinstance(cause, RuntimeError):
                raise cause from None
            raise CaptureError(f"the device refused to capture a step: {cause}") from cause
        return graph.replay

    def pool_bytes(self) -> int:
        """What torch's allocator has reserved, without what it keeps from earlier runs: that is
        given back when a capture begins."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def free_bytes(self) -> int | None:
        """What the device has left, and what torch's allocator holds unused."""
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return torch.cuda.mem_get_info(self._device)[0] + unused


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        replay: repeats it.
        pool_bytes: device memory that recording it took beyond what was held after its warm-up;
            small buckets reuse what larger ones, captured before them, needed.
        addresses: data pointers of its buffers and weights, by name.
    """

    replay: Run
    pool_bytes: int
    addresses: dict[str, int]

    def check_addresses(self, graph: StepGraph) -> None:
        """Compare the tensors that a step is bound to with those it was captured on.

        Raises:
            CaptureError: one has moved.
        """
        for name, tensor in static_tensors(graph).items():
            if tensor.data_ptr() != self.addresses[name]:
                raise CaptureError(
                    f"{name} moved from {self.addresses[name]:#x} to {tensor.data_ptr():#x} since "
                    f"{graph.key} was captured; the graph would use the old memory"
                )


def capture_step(run: Run, graph: StepGraph, graphs: Graphs) -> Captured:
    """Warm up and record one step; its buffers hold afterwards what they held before.

    Meanwhile the batch is empty: every row is off, so nothing is written to any cache page, and
    pools of any size need no copy.
    """
    with empty_batch(graph):
        for _ in range(WARM_UPS):
            graphs.warm_up(run)
        before = graphs.pool_bytes()
        replay = graphs.record(run)
    addresses = {name: tensor.data_ptr() for name, tensor in static_tensors(graph).items()}
    return Captured(replay, graphs.pool_bytes() - before, addresses)


def static_tensors(graph: StepGraph) -> dict[str, Tensor]:
    """Buffers and weights of a step, whose addresses a graph holds."""
    held = dict(graph.module.named_buffers(remove_duplicate=False))
    held.update(graph.module.named_parameters(remove_duplicate=False))
    return held


@contextmanager
def empty_batch(graph: StepGraph) -> Iterator[None]:
    """Padding in every buffer of the batch; afterwards all small buffers as they were.

    But for what crosses from `verify` to `propose`, which stays as an empty batch left it: the
    second half, captured next, must not run on whatever stood there.
    """
    small = {n: t for n, t in graph.buffers().items() if not n.startswith(("kv.", "cross."))}
    saved = {name: tensor.clone() for name, tensor in small.items()}
    try:
        for name, tensor in small.items():
            if name.startswith("batch."):
                tensor.fill_(graph.layout[name].pad)
        yield
    finally:
        for name, tensor in small.items():
            tensor.copy_(saved[name])


Lower = Callable[[StepGraph], Run]
"""Compiles a flat, verified graph to a callable without arguments."""


def kernels_of(run: Run) -> Counter[str]:
    """What one run launches on the GPU, by name, copies and fills included: torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in seen.events() or () if event.device_type == on_device)
