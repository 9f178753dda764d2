"""Profiles a step: the device time of each kernel, and its distance from the time of its bytes.

A profiler replaces the clock of decode steps in the middle of a text. torch's profiler slows down
everything after it in a process, so profiles come after all timed cases.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.rows import Row
from mtpc.backends.base import Run

SKIPPED, PROFILED = 2, 5
"""Decode steps."""
GAPS = 3
_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|cutlass|cublas|splitk|Cijk_|aten\.(add)?mm|aten\.linear|skinny|norm_linear|batch_invariant_linear"
)
"""Matrix products of the libraries: NVIDIA's, AMD's Tensile (Cijk), ATen's on the null device; and
ours of few rows."""
_EXPERTS = re.compile(r"experts?_|mtpc\.experts")


@dataclass
class Spent:
    """The launches and device seconds of a kernel in some steps."""

    launches: int = 0
    seconds: float = 0.0


class Profiler(ABC):
    """Runs steps, and profiles a few of them after some that warm up.

    Attributes:
        spent: by kernel.
        steps: how many were looked at.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.steps, self._seen = 0, 0

    def run(self, work: Run) -> None:
        """One step."""
        self._seen += 1
        if SKIPPED < self._seen <= SKIPPED + PROFILED:
            self.look(work)
            self.steps += 1
        else:
            work()

    def read(self) -> list[float]:
        """Nothing: it is no clock."""
        return []

    @abstractmethod
    def look(self, work: Run) -> None:
        """Run one step, and `add` what it launched."""

    def add(self, name: str, seconds: float) -> None:
        """One launch."""
        spent = self.spent.setdefault(name, Spent())
        spent.launches += 1
        spent.seconds += seconds


class DeviceProfiler(Profiler):
    """By torch's profiler, on a GPU."""

    def look(self, work: Run) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        for event in seen.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                self.add(event.name, 1e-6 * event.time_range.elapsed_us())


class OperatorProfiler(Profiler):
    """By operator, with the host's time: the null device has no kernels."""

    def look(self, work: Run) -> None:
        with _Timed(self):
            work()


class _Timed(TorchDispatchMode):
    def __init__(self, sampler: Profiler):
        super().__init__()
        self._sampler = sampler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._sampler.add(str(func), time.perf_counter() - begin)
        return result


def kernel_rows(whole: Row, profiler: Profiler) -> Iterator[Row]:
    """A row for each kernel of a step, the longest first.

    Args:
        whole: of the step.
        profiler: has seen some of its steps.
    """
    for name, spent in sorted(profiler.spent.items(), key=lambda item: -item[1].seconds):
        row = _row(whole, "kernel", name)
        row.kernels = round(spent.launches / profiler.steps)
        row.ms_device = 1e3 * spent.seconds / profiler.steps
        yield row


def gap_rows(whole: Row, kernels: list[Row], products: int) -> Iterator[Row]:
    """The largest differences from the time that weights take to be read.

    Args:
        whole: of the step, with its time, its bytes and the copy's bandwidth.
        kernels: of `kernel_rows`.
        products: bytes of the weights that matrix products read; experts' kernels read the others.
            All but weights counts as nothing: at short contexts it is.
    """
    groups: dict[str, Row] = {}
    for kernel in kernels:
        group = groups.setdefault(_group(kernel.engine), _row(whole, "gap", _group(kernel.engine)))
        group.kernels = (group.kernels or 0) + (kernel.kernels or 0)
        group.ms_device = (group.ms_device or 0) + (kernel.ms_device or 0)
    between = _row(whole, "gap", "time between kernels")
    between.ms_device = max(0.0, (whole.ms_device or 0) - sum(k.ms_device or 0 for k in kernels))
    read = {_PRODUCTS: products, _EXPERT_KERNELS: (whole.step_bytes or products) - products}
    for row in (rows := [*groups.values(), between]):
        row.step_bytes = read.get(row.engine, 0)
        fill_floor(row)
    yield from sorted(rows, key=lambda row: -(row.gap_ms or 0))[:GAPS]


def fill_floor(row: Row) -> None:
    """The time of its bytes at the copy's bandwidth, and what is beyond."""
    row.floor_ms = 1e3 * (row.step_bytes or 0) / (1e9 * (row.copy_gb_s or 1))
    row.gap_ms = (row.ms_device or 0) - row.floor_ms


_PRODUCTS, _EXPERT_KERNELS = "matrix products", "experts"


def _group(name: str) -> str:
    """Libraries choose kernels by shape, so what one of them has read is not known."""
    if _EXPERTS.search(name):
        return _EXPERT_KERNELS
    return _PRODUCTS if _PRODUCT.search(name) else name


def launches_in(profiler: Profiler) -> int:
    """Kernels of one step."""
    return round(sum(one.launches for one in profiler.spent.values()) / profiler.steps)


def _row(whole: Row, part: str, name: str) -> Row:
    row = Row(part, whole.device, whole.shape, name, whole.spec_tokens, whole.batch)
    row.copy_gb_s = whole.copy_gb_s
    return row
