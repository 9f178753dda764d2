"""How ranks exchange values within a step: through memory of one machine, or between GPUs.

    control messages: gloo, on the host  |  exchanges in a step: NCCL, on the device
    small exchanges of GPUs that read each other's memory: a kernel (`backends/peer_memory.py`)

On GPUs a step's group is mtpc's own, so the default group may be of any backend. torch names RCCL
"nccl", too. **This part has never run on a GPU.**

On CPUs ranks of one machine share memory. Rank 0 makes a file without a name in /dev/shm. The
others open it by its number in rank 0's process, and all map it. So processes that are killed leave
nothing there. The kernels of `cpu_kernels/collectives.cpp` use the memory by the name of the
process group. Where ranks cannot share memory, a tape calls the references in place of these
kernels, over torch.distributed.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mtpc.backends.check_device import check_device, device_name
from mtpc.backends.peer_memory import PEERS, PeerMemory, bytes_of
from mtpc.errors import BackendError
from mtpc.ops.collectives import group_of

if TYPE_CHECKING:
    from mtpc.ranks.group import Ranks

_BACKEND = "nccl"
_BY_NCCL = "GPUs exchange small values by NCCL, not by a kernel"
_FIRST_S = 60.0
"""How long the first exchange through the memory of peers may take; its kernel is compiled."""


@dataclass(frozen=True)
class Seen:
    """The GPUs that a rank's process sees.

    Attributes:
        machine: differs between machines.
        devices: an identity of each GPU, by torch's index.
        current: torch's index of the current GPU.
    """

    machine: str
    devices: tuple[str, ...]
    current: int


def join_devices(ranks: Ranks) -> tuple[str, str]:
    """Give each rank a GPU, which becomes torch's current one.

    The communicator is made here and used once: its memory counts before pages are planned, and
    during the capture of a graph it could not be made. So it is with memory that ranks share.

    Returns:
        The name of their group; and why small exchanges are NCCL's, too, "" if a kernel makes them.

    Raises:
        BackendError: this rank has no GPU, or none for itself alone, or torch lacks NCCL.
        RankError: that is so of another rank.
    """
    seen = ranks.tell_all(ranks.all_succeed(_see))
    index = ranks.all_succeed(lambda: choose_device(ranks.rank, seen))
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    name = ranks.all_succeed(lambda: make_group(ranks, device))
    chosen = ranks.tell_all(seen[ranks.rank].devices[index])
    fault = first_fault(_BY_NCCL, ranks.tell_all(why_apart(ranks.rank, seen, chosen)))
    return name, fault or share_peers(ranks, name, lambda: _symmetric(ranks, name, device))


def choose_device(rank: int, seen: Sequence[Seen]) -> int:
    """torch's index of a rank's GPU.

    If a host has given each process another current GPU, or lets it see one alone, it stays. If
    not, the ranks of a machine take its GPUs in order.

    Args:
        rank: which.
        seen: what each rank sees.

    Raises:
        BackendError: there are fewer GPUs than ranks on a machine.
    """
    one = seen[rank]
    beside = [other for other in seen if other.machine == one.machine]
    current = {other.devices[other.current] for other in beside}
    if len(current) == len(beside):
        return one.current
    index = sum(other.machine == one.machine for other in seen[:rank])
    if index >= len(one.devices):
        raise BackendError(
            f"rank {rank} of {len(seen)} has no GPU: {len(beside)} ranks run on its machine, and "
            f"torch sees {len(one.devices)} GPU(s) there; NCCL needs one for each rank: use a "
            "smaller tensor_parallel_size, or check CUDA_VISIBLE_DEVICES"
        )
    return index


def kind_of_device() -> str:
    """What decides how kernels of the current GPU add: all ranks must have the same."""
    device = torch.device("cuda", torch.cuda.current_device())
    return f"{device_name(device)}, {torch.version.hip or torch.version.cuda}"


def make_group(ranks: Ranks, device: torch.device) -> str:
    """The name of a new group by which all ranks have exchanged values on their devices.

    Raises:
        BackendError: the value is wrong.
    """
    from mtpc.backends.gpu.ops import exchanges  # No other start needs it.

    name = str(dist.new_group(backend=_BACKEND, device_id=device).group_name)
    own = torch.full((ranks.size,), ranks.rank, device=device)
    found = exchanges.gather_ranks(exchanges.exchange_ranks(own, name), ranks.size, name)
    if found.flatten().tolist() != [*range(ranks.size)] * ranks.size:
        raise BackendError(
            f"the first exchange on {device} gave {found.flatten().tolist()}; expected the numbers "
            "of all ranks: check the installation of NCCL (NCCL_DEBUG=INFO says what it uses)"
        )
    return name


def why_apart(rank: int, seen: Sequence[Seen], chosen: Sequence[str]) -> str:
    """Why a rank's GPU cannot read the memory of all others; "" if it can.

    Args:
        rank: whose GPU it is.
        seen: what each rank sees.
        chosen: each rank's GPU, as `Seen.devices` names it.
    """
    own = seen[rank]
    for other, device in enumerate(chosen):
        if seen[other].machine != own.machine:
            return f"is on another machine than rank {other}"
        if device not in own.devices:
            return f"does not see the GPU of rank {other}: check CUDA_VISIBLE_DEVICES"
        places = own.devices.index(chosen[rank]), own.devices.index(device)
        if other != rank and not torch.cuda.can_device_access_peer(*places):
            return f"has a GPU that cannot read the memory of rank {other}'s"
    return ""


def first_fault(outcome: str, faults: Sequence[str]) -> str:
    """What the first rank with a fault leads to, with the fault; "" if no rank has one."""
    told = [f"rank {rank} of {len(faults)} {fault}" for rank, fault in enumerate(faults) if fault]
    return f"{outcome}: {told[0]}" if told else ""


def share_peers(ranks: Ranks, name: str, make: Callable[[], PeerMemory]) -> str:
    """Have kernels make the small exchanges of a group, which they try once.

    Args:
        ranks: this process among them; every rank calls this.
        name: the group's.
        make: makes the memory, on all ranks at once.

    Returns:
        Why they do not, the same on all ranks; "" if they do.

    Raises:
        Exception: the kernel cannot be compiled or launched here.
        RankError: the same of another rank.
    """
    from mtpc.backends.triton_kernels import load_kernels  # It imports Inductor.

    own, memory = "", None
    try:
        load_kernels()
        memory = make()
    except (ImportError, RuntimeError, BackendError) as error:
        own = f"cannot share its GPU's memory: {str(error).partition(chr(10))[0]}"
    fault = first_fault(_BY_NCCL, ranks.tell_all(own))
    if memory is None or fault:
        return fault
    PEERS[name] = memory
    found = ranks.all_succeed(lambda: _first_sum(ranks, name, memory))
    fault = first_fault(_BY_NCCL, ranks.tell_all(found))
    if fault:
        del PEERS[name]
    return fault


def _symmetric(ranks: Ranks, name: str, device: torch.device) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(bytes_of(ranks.size), dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)  # Before a peer can raise a flag: ranks meet below.
    handle = symmetric.rendezvous(own, group_of(name))
    return PeerMemory(ranks.rank, own, torch.tensor(handle.buffer_ptrs, device=device), handle)


def _first_sum(ranks: Ranks, name: str, memory: PeerMemory) -> str:
    """What is wrong with a first exchange of the group; "" if nothing is."""
    own = torch.full((3,), 2.0**ranks.rank, device=memory.own.device)
    found = torch.ops.mtpc_loaded.sum_ranks(own, name)
    if own.is_cuda:
        done, until = torch.cuda.Event(), time.monotonic() + _FIRST_S
        done.record()
        while not done.query():
            if time.monotonic() > until:
                memory.let_go()
                return f"has waited for {_FIRST_S:.0f} s for the others' memory"
            time.sleep(0.001)
    wanted = 2.0**ranks.size - 1
    if found.tolist() == [wanted] * 3:
        return ""
    return f"has read {found.tolist()} there, expected {wanted}"


def _see() -> Seen:
    check_device()
    if not dist.is_nccl_available():
        raise BackendError(
            "backend 'cuda' with tensor_parallel_size > 1 needs a torch with NCCL (RCCL on ROCm), "
            f"and this one ({torch.__version__}) is built without it; use tensor_parallel_size=1, "
            "or a torch for Linux from pytorch.org"
        )
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    devices = tuple(str(getattr(each, "uuid", i)) for i, each in enumerate(properties))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Seen(boot, devices, torch.cuda.current_device())


def step_timeout_s() -> float:
    """How long a rank of the default process group waits for another."""
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(world._device_types[0])
    return float(backend.options._timeout.total_seconds())


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
