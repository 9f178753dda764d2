"""Capturing a lowered step as one device graph. CUDA and HIP have one interface in torch.

This file has the order of warm-up and capture; the device is behind the interface `Graphs`. So
tests run the same order on the null device, which refuses and freezes what a device would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.capture.graph import StepGraph
from mtpc.errors import CaptureError

WARM_UPS = 2
"""Runs before capture. The first one compiles and loads kernels, which capture forbids."""
ALIGNMENT = 16
"""If an example begins at a multiple of this many bytes, Inductor's code relies on it."""


class Graphs(Protocol):
    """What capture needs from a device. All graphs of one object share one memory pool."""

    def warm_up(self, run: Run) -> None:
        """Run once on the capture stream, outside of any graph, and wait for it."""
        ...

    def record(self, run: Run) -> Run:
        """Capture one run into the pool; returns the replay, on the caller's stream."""
        ...

    def pool_bytes(self) -> int:
        """Bytes of device memory that the process holds and cannot release, pool included."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes of device memory that the process can still get; None if it is not known."""
        ...


@dataclass(frozen=True)
class GraphReplay:
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        """Give up the graph. NCCL does not end a communicator that graphs still use."""
        self.graph.reset()


class TorchGraphs:
    """Capture by `torch.cuda.CUDAGraph`, which is a HIP graph if torch is built for ROCm."""

    def __init__(self, device: torch.device):
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> None:
        """Run once on the capture stream, which then owns lazily made handles and workspaces."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()

    def record(self, run: Run) -> Run:
        """Capture one run as a graph; work of other threads does not disturb the capture.

        Raises:
            CaptureError: the device refuses. torch then leaves the capture's stream current, and
                its pool in use, so the next capture gets others.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        options: dict[str, Any] = dict(pool=self._pool, stream=self._stream)
        first: Exception | None = None
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                try:
                    run()
                except Exception as error:
                    first = error  # The end of the broken capture raises another error.
                    raise
        except Exception as error:
            torch.cuda.set_stream(current)
            self._begin()
            cause = first or error
            if not isinstance(cause, RuntimeError):
                raise cause from None
            raise CaptureError(f"the device refused to capture a step: {cause}") from cause
        return GraphReplay(graph)

    def pool_bytes(self) -> int:
        """Bytes that torch's allocator has reserved, without its unused cache.

        torch releases that cache when a capture begins.
        """
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def free_bytes(self) -> int | None:
        """Free bytes of the device, and unused bytes that torch's allocator holds."""
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return torch.cuda.mem_get_info(self._device)[0] + unused


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        replay: runs it.
        pool_bytes: bytes by which its capture increased the device memory in use. A small bucket
            reuses the memory of larger ones, which are captured first.
        addresses: data pointers of its buffers and weights, by name.
        held: those tensors. The graph has their addresses, so their memory must not be given back,
            whatever becomes of the weights of the model.
    """

    replay: Run
    pool_bytes: int
    addresses: dict[str, int]
    held: tuple[Tensor, ...] = field(default=(), repr=False)


def capture_step(run: Run, graph: StepGraph, graphs: Graphs) -> Captured:
    """Warm up and capture one step; its buffers keep their contents.

    During both the batch is empty: all rows are inactive. So the step writes to no cache page, and
    the pools need no copy.
    """
    held = {name: tensor.detach() for name, tensor in static_tensors(graph).items()}
    with empty_batch(graph):
        for _ in range(WARM_UPS):
            graphs.warm_up(run)
        before = graphs.pool_bytes()
        replay = graphs.record(run)
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    return Captured(replay, graphs.pool_bytes() - before, addresses, tuple(held.values()))


def static_tensors(graph: StepGraph) -> dict[str, Tensor]:
    """Buffers and weights of a step by name; a captured graph holds their addresses."""
    held = dict(graph.module.named_buffers(remove_duplicate=False))
    held.update(graph.module.named_parameters(remove_duplicate=False))
    return held


def check_addresses(graph: StepGraph, captured: Mapping[str, int]) -> None:
    """Check that the tensors of a step are still where they were at capture, by data pointers.

    Raises:
        CaptureError: a tensor has another address.
    """
    tensors = static_tensors(graph)
    for name, address in captured.items():
        if tensors[name].data_ptr() != address:
            raise CaptureError(
                f"{name} moved from {address:#x} to {tensors[name].data_ptr():#x} since "
                f"{graph.key} was captured; a device graph would use the old memory"
            )


@contextmanager
def empty_batch(graph: StepGraph) -> Iterator[None]:
    """Fill all `batch.*` buffers with padding; restore them and `state.*` at the end.

    Buffers `cross.*` are not restored. They keep the values of an empty batch, because `propose` is
    captured after `verify` and must not run on undefined values.
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
    """Kernels that one run launches on the GPU, by name, including copies and fills.

    Source: torch's profiler.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in seen.events() or () if event.device_type == on_device)
