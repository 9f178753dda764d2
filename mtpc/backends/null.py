"""The null device: it records what a CUDA or HIP graph would fix, and replays exactly that.

Capture runs the step once and records each operator with the tensors that it used: buffers and
weights by address, temporaries by their memory. A replay repeats the operators on the same memory
with the same Python numbers. So it freezes whatever a device graph freezes. Temporaries are in one
pool, which uses memory again as a device's does. It refuses what a device graph
cannot do: reads of values by the host, results whose shape depends on data, and tensors made from
Python values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mtpc.backends.base import Run
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import check_addresses, empty_batch, static_tensors
from mtpc.backends.memory import GRANULE
from mtpc.capture.fake_calls import map_tensors, tensors_in
from mtpc.capture.graph import StepGraph
from mtpc.errors import CaptureError

_HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "_assert_async"}
_HOST_VALUES = {"lift_fresh", "lift", "scalar_tensor"}
_DATA_SHAPED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True)
class Place:
    """A tensor on a block, uint8 [bytes], without a reference that would keep the block in use.
    `like` is of the same dtype, sizes, strides and offset, on the device "meta"."""

    block: Tensor
    like: Tensor

    def tensor(self) -> Tensor:
        like, out = self.like, torch.empty(0, dtype=self.like.dtype)
        storage = self.block.untyped_storage()
        return out.set_(storage, like.storage_offset(), like.shape, like.stride())


@dataclass(frozen=True)
class _Use:
    """A block in use, of which `nbytes` were asked for, with a weak reference to the storage that
    tensors on it share."""

    block: Tensor
    nbytes: int
    storage: StorageWeakRef


class Pool:
    """Blocks of memory for the temporaries of recorded runs.

    A block is free once no tensor of the program is on it, and the next temporary that fits takes
    it. A program that goes on using such memory reads what the next temporary wrote, as it would on
    a device. All runs on one stream share the pool.

    Attributes:
        nbytes: bytes of all blocks.
        peak: most bytes that were in use at one time, without rounding.
    """

    def __init__(self) -> None:
        self.nbytes = self.peak = 0
        self._free: list[Tensor] = []
        self._uses: dict[int, _Use] = {}

    def adopt(self, result: Any, given: Iterable[Tensor]) -> Any:
        """Move an operator's new tensors to blocks; views of what it was given stay as they are."""
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        moved: dict[int, torch.UntypedStorage] = {}

        def move(tensor: Tensor) -> Tensor:
            old = tensor.untyped_storage()
            if old.nbytes() == 0 or old.data_ptr() in known:
                return tensor
            if old.data_ptr() not in moved:
                moved[old.data_ptr()] = self._take(old.nbytes())
                moved[old.data_ptr()].copy_(old)
            out = torch.empty(0, dtype=tensor.dtype)
            return out.set_(
                moved[old.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride()
            )

        return map_tensors(move, result)

    def place(self, tensor: Tensor) -> Tensor | Place:
        """Where a tensor is on a block; the tensor itself if it is on none."""
        use = self._uses.get(tensor.untyped_storage().data_ptr())
        if use is None:
            return tensor
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        like = meta.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Place(use.block, like)

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of its own on the smallest free block that is large enough, or on a new one."""
        for pointer, use in list(self._uses.items()):
            if use.storage.expired():  # No tensor is on the block any more.
                self._free.append(use.block)
                del self._uses[pointer]
        fits = [block for block in self._free if block.numel() >= nbytes]
        if fits:
            block = min(fits, key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            block = torch.empty(-(-nbytes // GRANULE) * GRANULE, dtype=torch.uint8)
            self.nbytes += block.numel()
        storage = torch.from_numpy(block.numpy()[:nbytes]).untyped_storage()
        self._uses[storage.data_ptr()] = _Use(block, nbytes, StorageWeakRef(storage))
        self.peak = max(self.peak, sum(use.nbytes for use in self._uses.values()))
        return storage


@dataclass(frozen=True)
class TapeEntry:
    """One recorded operator: its arguments, and the tensors of its results."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]


@dataclass
class Tape:
    """A captured step: operators in order, data pointers of static tensors at capture, by name, and
    the numbers of replays and of writes to static buffers between them."""

    entries: list[TapeEntry] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    host_writes: int = 0

    def replay(self) -> None:
        """Repeat the operators on the same memory; results go where they were at capture."""
        with torch.inference_mode():
            for entry in self.entries:
                fresh = tensors_in(entry.op(*entry.args, **entry.kwargs))
                for captured, new in zip(entry.outputs, fresh, strict=True):
                    if captured.data_ptr() != new.data_ptr():
                        captured.copy_(new)
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
        name = func.overloadpacket.__name__
        if name in _HOST_READS:
            raise CaptureError(
                f"{func} reads a device value on the host; a captured graph would freeze it"
            )
        if name in _HOST_VALUES:
            raise CaptureError(
                f"{func} makes a tensor from a Python value; a captured graph would freeze it"
            )
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise CaptureError(f"{func} with a mask has a result whose shape depends on data")
        if name != "index" and any(tag in func.tags for tag in _DATA_SHAPED):
            raise CaptureError(f"{func} has a result whose shape or value depends on data")
        result = self._pool.adopt(func(*args, **kwargs), tensors_in((args, kwargs)))
        # Places, because a tensor on the tape would keep its memory in use.
        whole = (args, kwargs, tuple(tensors_in(result)))
        call = map_tensors(self._pool.place, whole)
        self._calls.append((func, call))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.inference_mode():
            for op, call in self._calls:
                call = map_aggregate(call, lambda v: v.tensor() if isinstance(v, Place) else v)
                self._tape.entries.append(TapeEntry(op, *call))


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

    `tapes` are recorded runs, in order, and `warm_ups` counts runs outside of any graph. `free`
    bytes of device memory are reported as free; None: not known.
    """

    def __init__(self, free: int | None = None) -> None:
        self.tapes: list[Tape] = []
        self.warm_ups = 0
        self.free = free
        self.pool = Pool()

    def warm_up(self, run: Run) -> None:
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
        return self.pool.nbytes

    def free_bytes(self) -> int | None:
        return self.free


class _Replay:
    """Repeats a tape, after a check that no static tensor has moved."""

    def __init__(self, tape: Tape, graph: StepGraph):
        self.tape, self.graph = tape, graph
        self._batch = {n: t for n, t in graph.buffers().items() if not n.startswith("kv.")}
        self._versions: dict[str, int] = {}

    def __call__(self) -> None:
        check_addresses(self.graph, self.tape.addresses)
        # A tensor counts in-place writes as its version.
        for name, version in self._versions.items():
            self.tape.host_writes += self._batch[name]._version - version
        self.tape.replay()
        self._versions = {name: tensor._version for name, tensor in self._batch.items()}
