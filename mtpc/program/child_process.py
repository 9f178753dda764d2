"""Building in a process of its own.

Tracing leaves transformers in memory, and a heap that does not shrink. A server would keep both for
as long as it runs. So another process builds a large checkpoint's steps into the cache, and the
caller then starts from the cache, as any later process does.

    caller: job ->          | child: `mtpc.program.build.build`
    <- Progress, MtpcError  | the caller's end of the pipe closes: the child ends, too
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtpc.backends.cpu_kernels import build_kernels
from mtpc.config import CompileOptions
from mtpc.errors import BackendError, CacheWriteError, MtpcError
from mtpc.layout import Graphs
from mtpc.layout.progress import Listener, Progress, line_reporter
from mtpc.program.host_memory import check_model
from mtpc.program.processes import end_children, how_it_ended, start_python, without_collections
from mtpc.program.ranks import Ranks
from mtpc.program.step_cache import StepCache
from mtpc.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mtpc.program.build import Check

LARGE = 256 * 2**20
"""From so many bytes of weights on, a process is worth the four seconds that it takes to start."""
BACKGROUND_NICE = 10
"""How far a build in the background gives way to the process that serves."""
_GRACE_S = 10.0
"""Seconds that a child has to clean up, once it was told to end."""


def build_in_child(
    source: Checkpoint,
    options: CompileOptions,
    graphs: Graphs,
    cache: StepCache,
    listener: Listener,
    owns_buffers: bool,
    ranks: Ranks | None = None,
) -> bool:
    """Have what the cache lacks built into it, if the checkpoint is large.

    Args:
        source: the checkpoint.
        options: as asked for, for a backend whose steps are packages.
        graphs: which steps.
        cache: of this checkpoint and these options.
        listener: hears of progress.
        owns_buffers: whether state takes memory of this process.
        ranks: whose part of the steps this is; None: the whole.

    Returns:
        Whether the cache has all of it now. It does not if the checkpoint is small, if the cache
        cannot be written, or if the kernels cannot be compiled; compiling in this process then
        reports why.

    Raises:
        MtpcError: as `mtpc.program.build.build`.
        CapacityError: the steps could not run on this machine.
        BackendError: the process died.
    """
    if source.nbytes < LARGE or not sys.executable:
        return False
    if all(cache.find(key, part) for key, part in graphs):
        return False  # The cache has all, and yet only transformers can read the weights.
    try:
        cache.store.prepare()
        build_kernels(cache.store, line_reporter(listener))
    except (CacheWriteError, BackendError):
        return False
    check = partial(check_model, owns_buffers=owns_buffers)
    job = (source.directory.absolute(), options, graphs, check, False, ranks)
    with building_child(*job) as (process, pipe):
        for event in _events(pipe):
            if isinstance(event, MtpcError):
                raise event
            listener(event)
        status = process.wait()
    if status != 0:
        raise BackendError(
            f"the process that compiled {source.directory} ended with "
            f"{how_it_ended(status)}; what it had finished is in the cache"
        )
    return True


def _events(pipe: Connection) -> Iterator[Progress | MtpcError]:
    """What a child reports, until it closes its end of the pipe: it is done, or dead."""
    try:
        while True:
            yield pipe.recv()
    except (EOFError, OSError):
        return


@contextmanager
def building_child(
    directory: Path,
    options: CompileOptions,
    graphs: Graphs,
    check: Check | None = None,
    in_background: bool = False,
    ranks: Ranks | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """A process that builds graphs, and the pipe from it; it ends where the block does.

    Args:
        directory: the checkpoint.
        options: as for `mtpc.program.build.build`.
        graphs: which steps.
        check: sees the model, and may refuse it.
        in_background: whether the build gives way to the process that serves.
        ranks: whose part of the steps this is; None: the whole.
    """
    process, pipe = start_python(__name__)
    try:
        with suppress(OSError):  # It has died already; its status says how.
            job = (directory, options, graphs, check, in_background, ranks)
            pipe.send((torch.get_num_threads(), *job))
        yield process, pipe
    finally:
        pipe.close()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(handle: int) -> None:
    """The child's side: do the one job that comes through the pipe.

    Args:
        handle: file descriptor of its end.
    """
    with without_collections():
        _do_job(Connection(handle))
        gc.freeze()  # The caller waits for this process to end, which searches what is left.


def _do_job(pipe: Connection) -> None:
    from mtpc.program.build import build

    threads, directory, options, graphs, check, in_background, ranks = pipe.recv()
    torch.set_num_threads(threads)
    if in_background:
        os.nice(BACKGROUND_NICE)
    jobs = 1 if in_background else None
    caller = _Caller(pipe)
    try:
        tiers, parts = (options.spec_tokens,), (ranks,)
        build(directory, options, tiers, "fused", jobs, pipe.send, check, graphs, parts)
    except MtpcError as error:
        caller.is_waiting = False
        pipe.send(error)
    except (KeyboardInterrupt, OSError):
        if not caller.has_gone:
            raise
        sys.exit(130)  # No caller is left to read why.
    caller.is_waiting = False


class _Caller(threading.Thread):
    """Interrupts this process's work when the other end of the pipe closes."""

    def __init__(self, pipe: Connection):
        super().__init__(name="mtpc-caller", daemon=True)
        self.is_waiting, self.has_gone = True, False
        self._pipe = pipe
        self.start()

    def run(self) -> None:
        """Wait until the caller's end of the pipe closes."""
        try:
            self._pipe.recv()
        except (EOFError, OSError):
            self.has_gone = True
            if self.is_waiting:
                end_children()
                interrupt_main()
