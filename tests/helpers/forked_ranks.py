"""Ranks as forks of a process that has torch and transformers imported, and no threads.

A fork of the test's own process may hang: it holds the locks of threads that it lacks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtpc.program.processes import end_with_parent
from mtpc.ranks.group import Ranks, join_ranks

PRELOADED = ["torch", "torch._dynamo", "torch.export._trace", "transformers.modeling_utils"]
"""What the process of the forks imports once: each takes seconds. Nothing of mtpc, which may be a
copy that only the path of the test's process leads to."""
Body = Callable[[Ranks], Any]
"""The function that each rank runs, which must pickle. It may yield once, to report progress."""


@dataclass
class Fork:
    """One rank, from the test's side."""

    process: Any
    pipe: Connection

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def told(self, within_s: float = 60.0) -> Any:
        """The next message of the rank: its yielded value, then its result.

        Raises:
            AssertionError: the rank raised an error, has ended, or sends no message in time.
        """
        assert self.pipe.poll(within_s), f"nothing was told for {within_s} s"
        try:
            value, error = self.pipe.recv()
        except EOFError:
            raise AssertionError("the rank has ended") from None
        assert not error, error
        return value


@contextmanager
def forks_of(size: int, directory: Path, body: Body, wait_s: float = 60.0) -> Iterator[list[Fork]]:
    """Ranks of one process group, which end with the block.

    Args:
        size: number of ranks.
        directory: directory of the process group's store.
        body: the function that each rank runs.
        wait_s: timeout of a collective.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)
    first.start()
    first.join()  # The imports of `PRELOADED` have no part in the limits below.
    forks: list[Fork] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(directory / "store"), body, wait_s, theirs)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            forks.append(Fork(process, ours))
        yield forks
    finally:
        for fork in forks:
            with suppress(ProcessLookupError):
                fork.kill()
            fork.process.join()
            fork.pipe.close()


def run_ranks(size: int, directory: Path, body: Body, within_s: float = 60.0) -> list[Any]:
    """Run all ranks; returns their results in order."""
    with forks_of(size, directory, body, within_s) as forks:
        return [fork.told(within_s) for fork in forks]


def _run(rank: int, size: int, store: str, body: Body, wait_s: float, pipe: Connection) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            *("gloo", f"file://{store}", timedelta(seconds=wait_s)), rank=rank, world_size=size
        )
        found = body(join_ranks(size))
        if isinstance(found, Iterator):
            pipe.send((next(found), ""))
            found = next(found)
        pipe.send((found, ""))
        signal.pause()  # Others may still read from this one.
    except BaseException:
        pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)  # Without the ends of what the test's process holds.
