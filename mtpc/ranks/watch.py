"""Bounds the time of steps whose ranks exchange values on GPUs, and ends exchanges.

torch's own watchdog does not see exchanges within a captured graph. So `StepWatch` bounds the time
for which rank 0 waits for a step, and names the rank that hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from mtpc.backends.peer_memory import PEERS
from mtpc.errors import LostRankError
from mtpc.ops.collectives import group_of
from mtpc.ranks.group import Ranks


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
