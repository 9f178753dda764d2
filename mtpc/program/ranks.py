"""The ranks that share a model: this process among them, what they agree on, and their memory.

Ranks of one machine exchange values within a step through memory that they share. Rank 0 makes a
file without a name in /dev/shm. The others open it by its number in rank 0's process, and all map
it. So processes that are killed leave nothing there. The kernels of `cpu_kernels/collectives.cpp`
use the memory by the name of the process group. Where ranks cannot share memory, a tape calls the
references in place of these kernels, over torch.distributed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import mtpc
from mtpc.backends.peer_memory import MOST_BYTES
from mtpc.errors import LostRankError, OptionError, RankError
from mtpc.plan import Plan
from mtpc.program.model_key import checkpoint_fields, sample_digest
from mtpc.program.rank_devices import first_fault, join_devices, kind_of_device
from mtpc.store.sources import source_fields
from mtpc.weights.checkpoint import Checkpoint

T = TypeVar("T")
DEFAULT_GROUP = "0"
"""torch's name of the default process group."""
_IDLE = timedelta(days=365)
"""How long a rank waits for rank 0's next step. If a rank ends, its connections close at once."""


@dataclass(frozen=True)
class _Failed:
    """What a rank tells that cannot go on."""

    reason: str


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: of this process, from 0; rank 0 schedules.
        size: how many there are.
        group: name of the process group of the steps' collectives.
        control: the group on which rank 0 tells the others what to do; None without others.
        on_gpus: whether the steps exchange values on GPUs.
        peer_bytes: the largest part that a kernel exchanges through the memory of GPUs; 0: none.
        apart: on GPUs: why none does; "" if one does.
    """

    rank: int
    size: int
    group: str = DEFAULT_GROUP
    control: Any = field(default=None, repr=False)
    on_gpus: bool = False
    peer_bytes: int = 0
    apart: str = ""

    @property
    def part(self) -> str:
        """Whose part of the steps this is, in the cache's keys."""
        return f"rank {self.rank} of {self.size} in group {self.group!r}"

    @property
    def place(self) -> Ranks:
        """A copy without the process group, for another process that builds for this rank."""
        return replace(self, control=None)

    @property
    def all_places(self) -> tuple[Ranks, ...]:
        """All ranks in order, without the process group."""
        return tuple(replace(self.place, rank=rank) for rank in range(self.size))

    def compare(self, source: Any, plan: Plan) -> None:
        """Check that all ranks have the same versions, model and options.

        Raises:
            RankError: a rank differs; the message says which, and in what.
        """
        facts = _facts(source, plan, self.on_gpus)
        for rank, other in enumerate(self.tell_all(facts)):
            names = [name for name, value in other.items() if facts.get(name) != value]
            if names:
                name = names[0]
                raise RankError(
                    f"rank {rank} of {self.size} has {name} {other[name]!r}, and rank {self.rank} "
                    f"has {facts.get(name)!r}; expected the same on every rank"
                )

    def all_succeed(self, make: Callable[[], T]) -> T:
        """What `make` gives, if it succeeds on every rank.

        Raises:
            Exception: what `make` raises here.
            RankError: another rank failed; the message says which, and why.
        """
        try:
            made = make()
        except RankError:
            raise  # All ranks know, as each has told or heard it.
        except Exception as error:
            with suppress(RankError):  # The reason here is this rank's own.
                self.tell_all(_Failed(f"{type(error).__name__}: {error}"))
            raise
        self.tell_all(None)
        return made

    def tell_all(self, told: T) -> list[T]:
        """What each rank tells all others, in the order of the ranks; every rank calls this.

        Raises:
            RankError: a rank has failed since the last call, and tells that instead.
            LostRankError: another rank has ended.
        """
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, told, group=self.control)
        except Exception as error:
            raise LostRankError(
                f"rank {self.rank} of {self.size} has lost the others before the first step: one "
                f"has ended: {error}"
            ) from error
        for rank, other in enumerate(every):
            if isinstance(other, _Failed):
                raise RankError(f"rank {rank} of {self.size} failed: {other.reason}")
        return every

    def meet(self) -> None:
        """Wait for all ranks, however long each of them compiles.

        Raises:
            RankError: as `tell_all`.
        """
        if self.control is not None:
            self.tell_all(None)


def all_parts(size: int) -> tuple[Ranks | None, ...]:
    """The ranks of a default process group of that size; (None,) if one process has everything."""
    return tuple(Ranks(rank, size) for rank in range(size)) if size > 1 else (None,)


def join_ranks(size: int, on_gpus: bool = False) -> Ranks:
    """This process's place in the default process group, which the host has made.

    Args:
        size: how many ranks there must be.
        on_gpus: whether steps run on GPUs, one for each rank. They then exchange values in a group
            of their own; see `join_devices`.

    Raises:
        RankError: another rank has no GPU for itself, or torch there lacks NCCL.
        BackendError: the same of this rank.
        OptionError: there is no process group, or it has another number of ranks.
    """
    ready = dist.is_available() and dist.is_initialized()
    found = dist.get_world_size() if ready else 0
    if found != size:
        what = f"a process group of {found} ranks" if ready else "no process group"
        raise OptionError(
            f"tensor_parallel_size is {size} with {what}; expected one of {size} ranks: call "
            "torch.distributed.init_process_group in every rank, or use "
            f"mtpc run --tensor-parallel-size {size}"
        )
    assert dist.group.WORLD is not None
    control = dist.new_group(backend="gloo", timeout=_IDLE)
    ranks = Ranks(dist.get_rank(), size, dist.group.WORLD.group_name, control)
    if not on_gpus:
        return ranks
    group, apart = join_devices(ranks)
    peer_bytes = 0 if apart else MOST_BYTES
    return replace(ranks, group=group, on_gpus=True, peer_bytes=peer_bytes, apart=apart)


def step_timeout_s() -> float:
    """How long a rank of the default process group waits for another."""
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(world._device_types[0])
    return float(backend.options._timeout.total_seconds())


def _facts(source: Any, plan: Plan, on_gpus: bool) -> dict[str, str]:
    """What must be the same on every rank."""
    facts = {"mtpc": mtpc.__version__, "torch": torch.__version__, **source_fields()}
    if isinstance(source, Checkpoint):
        facts |= checkpoint_fields(source) | {"model.values": sample_digest(source)}
    if on_gpus:
        facts["device"] = kind_of_device()
    return {**facts, "options": repr(plan)}


SLOT_BYTES = 2**18
"""What a rank tells at once; longer values take turns. Such slots of two ranks stay in caches."""
_HEADER_BYTES = 4096
"""What is before the slots: `kHeaderBytes` of `cpu_kernels/group_memory.h`."""
_DIRECTORY = Path("/dev/shm")
_APART = "ranks exchange values over torch.distributed, not through shared memory"


@dataclass(frozen=True)
class _Place:
    """Where a rank runs, and whether it can share memory.

    Attributes:
        machine: differs where processes cannot open each other's files.
        process: its id.
        path: by which others open the memory; of rank 0 only.
        fault: why the rank cannot share memory; "" if it can.
    """

    machine: str = ""
    process: int = 0
    path: str = ""
    fault: str = ""


def share_memory(ranks: Ranks, slot_bytes: int = SLOT_BYTES) -> str:
    """Share memory with all ranks of the default process group, for as long as it is there.

    It takes the place of what they have shared before. Every rank calls this at the same time, when
    the cpu kernels are loaded, and no step runs.

    Args:
        ranks: this process among them.
        slot_bytes: what a rank can tell at once, a multiple of 64.

    Returns:
        Why the ranks share none, the same on all of them; "" if they do.

    Raises:
        LostRankError: another rank has ended.
    """
    with ExitStack() as stack:
        places = ranks.tell_all(_place(ranks, slot_bytes, stack))
        fault = first_fault(_APART, [place.fault for place in places])
        apart = "is on another machine than rank 0"
        others = [apart * (place.machine != places[0].machine) for place in places]
        fault = fault or first_fault(_APART, others)
        if fault:
            return fault
        own, number = "", 0
        try:
            processes = [place.process for place in places]
            where = (ranks.group, places[0].path, slot_bytes, ranks.rank, processes)
            number = torch.ops.mtpc_cpu.share_memory(*where, step_timeout_s())
        except RuntimeError as error:
            own = str(error).splitlines()[0]
        fault = first_fault(_APART, ranks.tell_all(own))
    unshare = torch.ops.mtpc_cpu.unshare_memory
    if fault:
        unshare(ranks.group)
    else:
        weakref.finalize(dist.group.WORLD, unshare, ranks.group, number).atexit = False
    return fault


def _place(ranks: Ranks, slot_bytes: int, stack: ExitStack) -> _Place:
    """This rank's place, which shares nothing any more; rank 0's file is there until the stack is
    closed."""
    if not hasattr(torch.ops.mtpc_cpu, "share_memory"):
        return _Place(fault="has not loaded the cpu kernels")
    torch.ops.mtpc_cpu.unshare_memory(ranks.group)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}, processes {os.stat('/proc/self/ns/pid').st_ino}"
        if ranks.rank:
            return _Place(machine, os.getpid())
        file = stack.enter_context(tempfile.TemporaryFile(dir=_DIRECTORY))  # noqa: SIM115
        os.posix_fallocate(file.fileno(), 0, _HEADER_BYTES + 2 * ranks.size * slot_bytes)
        return _Place(machine, os.getpid(), f"/proc/{os.getpid()}/fd/{file.fileno()}")
    except OSError as error:
        return _Place(fault=f"cannot share memory: {error}")
