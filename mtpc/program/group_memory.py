"""Memory that the ranks of one machine share, through which they exchange values within a step.

Rank 0 makes a file without a name in /dev/shm. The others open it by its number in rank 0's
process, and all map it. So processes that are killed leave nothing there. The kernels of
`cpu_kernels/collectives.cpp` use the memory by the name of the process group. Where ranks cannot
share memory, a tape calls the references in place of these kernels, over torch.distributed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mtpc.program.rank_devices import first_fault
from mtpc.program.ranks import Ranks, step_timeout_s

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
