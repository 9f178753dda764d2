"""The null device: it records what a CUDA or HIP graph would fix, and replays exactly that.

Capture runs the step once and records each operator with the tensors that it used: buffers and
weights by address, temporaries by their memory. A replay repeats the operators on the same memory
with the same Python numbers. So it freezes whatever a device graph freezes. Temporaries are in one
pool, which uses memory again as a device's does (`null_pool.py`). It refuses what a device graph
cannot do: reads of values by the host, results whose shape depends on data, and tensors made from
Python values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mtpc.backends.base import Run
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import check_addresses, empty_batch, static_tensors
from mtpc.backends.null_pool import Place, Pool
from mtpc.capture.fake_calls import tensors_in
from mtpc.capture.graph import StepGraph
from mtpc.errors import CaptureError

_HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "_assert_async"}
_HOST_VALUES = {"lift_fresh", "lift", "scalar_tensor"}
_DATA_SHAPED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True)
class TapeEntry:
    """One recorded operator: its arguments, and the tensors of its results."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]


@dataclass
class Tape:
    """A captured step.

    Attributes:
        entries: operators in order.
        addresses: data pointer of each static tensor at capture, by name.
        replays: number of replays.
        host_writes: number of writes to static buffers between replays.
    """

    entries: list[TapeEntry] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    host_writes: int = 0

    def replay(self) -> None:
        """Repeat the operators on the same memory."""
        with torch.inference_mode():
            for entry in self.entries:
                _repeat(entry)
        self.replays += 1


class _Recorder(TorchDispatchMode):
    """Records every operator that runs on a tape; new tensors are in a pool."""

    def __init__(self, tape: Tape, pool: Pool):
        super().__init__()
        self._tape, self._pool = tape, pool
        self._calls: list[tuple[torch._ops.OpOverload, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args)
        result = self._pool.adopt(func(*args, **kwargs), tensors_in((args, kwargs)))
        # Places, because a tensor on the tape would keep its memory in use.
        whole = (args, kwargs, tuple(tensors_in(result)))
        call = tree_map_only(Tensor, self._pool.place, whole)
        self._calls.append((func, call))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.inference_mode():
            for op, call in self._calls:
                self._tape.entries.append(TapeEntry(op, *tree_map_only(Place, Place.tensor, call)))


def _refuse(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Raise CaptureError for an operator that a device graph cannot repeat."""
    name = op.overloadpacket.__name__
    if name in _HOST_READS:
        raise CaptureError(
            f"{op} reads a device value on the host; a captured graph would freeze it"
        )
    if name in _HOST_VALUES:
        raise CaptureError(
            f"{op} makes a tensor from a Python value; a captured graph would freeze it"
        )
    if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
        raise CaptureError(f"{op} with a mask has a result whose shape depends on data")
    if name != "index" and any(tag in op.tags for tag in _DATA_SHAPED):
        raise CaptureError(f"{op} has a result whose shape or value depends on data")


class NullDevice(EagerBackend):
    """A backend that captures steps as tapes, so that capture can be tested without a device.

    Each reference op is one kernel on the tape.
    """

    name = "null"

    def __init__(self) -> None:
        super().__init__()
        self.tapes: dict[str, Tape] = {}
        self.pool = Pool()

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Record one run on a tape; returns the replay.

        As on a device, capture works on the live buffers; see `graphs.empty_batch`.
        """
        static = static_tensors(graph)
        tape = Tape(addresses={name: tensor.data_ptr() for name, tensor in static.items()})
        with empty_batch(graph), torch.inference_mode(), _Recorder(tape, self.pool):
            graph.module()
        self.tapes[graph.name] = tape
        return _Replay(tape, graph)


class NullGraphs:
    """`graphs.Graphs` over tapes: the capture of a device backend, without its device.

    Args:
        free: bytes of device memory to report as free; None: not known.

    Attributes:
        tapes: recorded runs, in order.
        warm_ups: number of runs outside of any graph.
        free: bytes of device memory to report as free; None: not known.
        pool: the memory of all temporaries.
    """

    def __init__(self, free: int | None = None) -> None:
        self.tapes: list[Tape] = []
        self.warm_ups = 0
        self.free = free
        self.pool = Pool()

    def warm_up(self, run: Run) -> None:
        """Run once, and count it."""
        self.warm_ups += 1
        run()

    def record(self, run: Run) -> Run:
        """Run once and record the operators; the replay repeats them on the same memory."""
        tape = Tape()
        with torch.inference_mode(), _Recorder(tape, self.pool):
            run()
        self.tapes.append(tape)
        return tape.replay

    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pool.nbytes

    def free_bytes(self) -> int | None:
        """The number of bytes that the constructor was given."""
        return self.free


class _Replay:
    """Repeats a tape, after a check that no static tensor has moved."""

    def __init__(self, tape: Tape, graph: StepGraph):
        self.tape, self.graph = tape, graph
        self._batch = {n: t for n, t in graph.buffers().items() if not n.startswith("kv.")}
        self._versions: dict[str, int] = {}

    def __call__(self) -> None:
        check_addresses(self.graph, self.tape.addresses)
        self._count_host_writes()
        self.tape.replay()
        self._versions = {name: tensor._version for name, tensor in self._batch.items()}

    def _count_host_writes(self) -> None:
        """Add the in-place writes since the last replay, which tensors count as their version."""
        if self._versions:
            self.tape.host_writes += sum(
                tensor._version - self._versions[name] for name, tensor in self._batch.items()
            )


def _repeat(entry: TapeEntry) -> None:
    """Run one operator again, and put its results into the captured memory."""
    fresh = tensors_in(entry.op(*entry.args, **entry.kwargs))
    for captured, new in zip(entry.outputs, fresh, strict=True):
        if captured.data_ptr() != new.data_ptr():
            captured.copy_(new)
