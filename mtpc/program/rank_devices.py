"""Which GPU each rank has, how GPUs exchange values within a step, and a bound on a step's time.

    control messages: gloo, on the host  |  exchanges in a step: NCCL, on the device
    small exchanges of GPUs that read each other's memory: a kernel (`backends/peer_memory.py`)

A step's group is mtpc's own, so the default group may be of any backend. torch names RCCL "nccl",
too. torch's own watchdog does not see exchanges within a captured graph, so `StepWatch` bounds the
time for which rank 0 waits, and names the rank that hangs. **This module has never run on a GPU.**
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mtpc.backends.check_device import check_device, device_name
from mtpc.backends.peer_memory import PEERS, PeerMemory, bytes_of
from mtpc.errors import BackendError, LostRankError
from mtpc.ops.collectives import group_of

if TYPE_CHECKING:
    from mtpc.program.ranks import Ranks

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


def watch_steps(ranks: Ranks, limit_s: float) -> StepWatch | None:
    """Watches a program's steps if ranks exchange values on GPUs; None on CPUs, where exchanges
    have a timeout of their own."""
    if not ranks.on_gpus:
        return None
    store, end = dist.distributed_c10d._get_default_store(), partial(end_exchanges, ranks)
    return StepWatch(ranks.rank, ranks.size, store, ranks.group, limit_s, end)


def end_exchanges(ranks: Ranks) -> None:
    """End a group's exchanges that wait for a rank that is lost. Graphs go on with wrong values."""
    if ranks.group in PEERS:
        PEERS[ranks.group].let_go()
    dist.distributed_c10d._abort_process_group(group_of(ranks.group))


def leave_devices(ranks: Ranks) -> None:
    """Give up the group on which graphs exchanged values, when they are released."""
    if ranks.on_gpus:
        PEERS.pop(ranks.group, None)
        dist.destroy_process_group(group_of(ranks.group))


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


_POLL_S = 1.0
"""Seconds between two looks at the clock, or at the store."""
_ANSWER_S = 3.0
"""Seconds in which a rank that lives has answered."""
_END_S = 5.0
"""Seconds after which exchanges must have ended that were aborted."""


class StepWatch:
    """Watches the steps of one program; each rank has one.

    A thread of rank 0 looks at the clock while the host waits for a step. When the time is over, it
    asks the other ranks through the process group's store, and gives up the group's communicator,
    so that kernels that wait end. If they do not, the process ends. In each other rank a thread
    answers with the number of steps that the rank has launched.

    Args:
        rank: of this process.
        size: number of ranks.
        store: of the default process group.
        name: differs between programs, and is the same on all ranks.
        limit_s: how long rank 0 waits for a step.
        abort: ends exchanges that wait, on this rank.

    Attributes:
        launched: number of steps that this rank has launched.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        name: str,
        limit_s: float,
        abort: Callable[[], None],
    ):
        self._rank, self._size, self._store, self._key = rank, size, store, f"mtpc/watch/{name}"
        self._limit_s, self._abort = limit_s, abort
        self.launched = 0
        self._until: float | None = None
        self._failure = ""
        self._closed, self._is_back = threading.Event(), threading.Event()
        run = self._answer if rank else self._look
        threading.Thread(target=run, name="mtpc-step-watch", daemon=True).start()

    def wait(self, wait: Callable[[], None]) -> None:
        """On rank 0: wait for a step.

        Args:
            wait: returns when the step is done, or when its exchanges were aborted.

        Raises:
            LostRankError: the step has taken too long; the message names the rank that hangs.
        """
        self._is_back.clear()
        self._until = time.monotonic() + self._limit_s
        try:
            wait()
        finally:
            self._until = None
            self._is_back.set()
        if self._failure:
            raise LostRankError(self._failure)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_POLL_S):
            until = self._until
            if until is not None and time.monotonic() > until:
                self._failure = self._reason()
                threading.Thread(target=self._abort, daemon=True).start()
                if not self._is_back.wait(_END_S):
                    print("error:", self._failure, file=sys.stderr, flush=True)
                    os._exit(2)
                return

    def _answer(self) -> None:
        # The store is gone when rank 0 is.
        with suppress(RuntimeError):
            while not self._closed.wait(_POLL_S):
                if self._store.check([self._key]):
                    self._store.set(f"{self._key}/{self._rank}", str(self.launched))
                    return

    def _reason(self) -> str:
        """Which rank hangs: one that does not answer, or has launched fewer steps."""
        self._store.set(self._key, "")
        keys = {rank: f"{self._key}/{rank}" for rank in range(1, self._size)}
        until = time.monotonic() + _ANSWER_S
        while not self._store.check([*keys.values()]) and time.monotonic() < until:
            time.sleep(_POLL_S / 10)
        for rank, key in keys.items():
            if not self._store.check([key]):
                return f"rank {rank} of {self._size} has not answered for {self._limit_s:.0f} s"
        counts = {rank: int(self._store.get(key)) for rank, key in keys.items()}
        for rank, count in counts.items():
            if count < self.launched:
                return (
                    f"rank {rank} of {self._size} has launched {count} steps and hangs; rank 0 has "
                    f"launched {self.launched}, and has waited for {self._limit_s:.0f} s"
                )
        return (
            f"step {self.launched} has not ended for {self._limit_s:.0f} s, although all "
            f"{self._size} ranks have launched it: check the links between the GPUs "
            "(NCCL_DEBUG=INFO)"
        )
