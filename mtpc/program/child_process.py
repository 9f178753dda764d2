"""Building in a process of its own: before a program is bound, or while it serves.

Tracing leaves transformers in memory, and a heap that does not shrink. A server would keep both for
as long as it runs. So another process builds a large checkpoint's steps into the cache, and the
caller then starts from the cache, as any later process does.

    caller: job ->          | child: `mtpc.program.build.build`
    <- Progress, MtpcError  | the caller's end of the pipe closes: the child ends, too

With `build_in_background` a program begins with some of its steps. `Background`'s thread binds the
others when they are in the cache -> `Program.arrived` -> the engine takes them between two of its
steps.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtpc.backends.cpu_kernels import build_kernels
from mtpc.environment import free_bytes
from mtpc.errors import BackendError, CacheWriteError, CapacityError, MtpcError
from mtpc.layout import Graphs
from mtpc.layout.progress import Listener, Progress, line_reporter
from mtpc.plan import Plan
from mtpc.program.processes import (
    GRACE_S,
    WORKER,
    end_children,
    how_it_ended,
    start_beside,
    without_collections,
)
from mtpc.program.program import BuiltSteps, Program, StepBinder
from mtpc.program.step_cache import StepCache
from mtpc.program.workers import keeping_tokenizer
from mtpc.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mtpc.ranks.group import Ranks

BACKGROUND_NICE = 10
"""How far a build in the background gives way to the process that serves."""
_POLL_S = 0.1
NOTHING: Iterator[None] = iter(())
"""No steps to do while a child builds."""


@dataclass(frozen=True)
class ChildJob:
    """What a child builds.

    Attributes:
        directory: the checkpoint.
        plan: of the program, for a backend whose steps are packages.
        graphs: which steps.
        owns_buffers: whether state takes memory of this process; in the background it is there.
        in_background: whether the build gives way to the process that serves.
        ranks: whose part of the steps this is; None: the whole.
        early: bytes for weights that this process takes meanwhile.
    """

    directory: Path
    plan: Plan
    graphs: Graphs
    owns_buffers: bool = True
    in_background: bool = False
    ranks: Ranks | None = None
    early: int = 0


def build_in_child(
    job: ChildJob, cache: StepCache, listener: Listener, meanwhile: Iterator[None] = NOTHING
) -> bool:
    """Have what the cache lacks built into it.

    Args:
        job: what is to be there.
        cache: of its checkpoint and plan.
        listener: called with progress.
        meanwhile: what this process does in short steps while it waits.

    Returns:
        Whether the cache has all of it now. It does not if the cache cannot be written, or if the
        kernels cannot be compiled; compiling in this process then reports why.

    Raises:
        MtpcError: as `mtpc.program.build.build`.
        CapacityError: the steps could not run on this machine.
        BackendError: the process died.
    """
    if not sys.executable:
        return False
    if all(cache.find(key, part) for key, part in job.graphs):
        return False  # The cache has all, and yet only transformers can read the weights.
    try:
        cache.store.prepare()
        build_kernels(cache.store, line_reporter(listener))
    except (CacheWriteError, BackendError):
        return False
    _run_child(job, listener, meanwhile=meanwhile)
    return True


def _run_child(
    job: ChildJob,
    listener: Listener,
    is_closed: Callable[[], bool] = lambda: False,
    meanwhile: Iterator[None] = NOTHING,
) -> None:
    """Have a process do a job, until it is done or the caller has closed it. No process is left.

    Raises:
        MtpcError: the process ended with it, or died.
    """
    process, pipe = start_beside(__name__)
    try:
        with suppress(OSError):  # It has died already; its status says how.
            pipe.send((torch.get_num_threads(), job))
        while not is_closed():
            is_idle = next(meanwhile, True)
            if not pipe.poll(_POLL_S if is_idle else 0):
                continue
            try:
                event = pipe.recv()
            except (EOFError, OSError):  # It is done, or dead.
                process.wait()
                break
            if isinstance(event, MtpcError):
                raise event
            listener(event)
    finally:
        pipe.close()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode and not is_closed():
        raise BackendError(
            f"the process that compiled {job.directory} ended with "
            f"{how_it_ended(process.returncode)}; what it had finished is in the cache"
        )


def serve(handle: int) -> None:
    """The child's side: do the one job that comes through the pipe.

    Args:
        handle: file descriptor of its end.
    """
    with without_collections():
        _do_job(Connection(handle))
        gc.freeze()  # The caller waits for this process to end, which searches what is left.


def _do_job(pipe: Connection) -> None:
    job: ChildJob
    threads, job = pipe.recv()
    torch.set_num_threads(threads)
    jobs, check = None, None
    if job.in_background:
        os.nice(BACKGROUND_NICE)
        jobs = 1
    caller = _Caller(pipe)
    try:
        with keeping_tokenizer(job.plan.cache_dir, job.directory, jobs):
            # Imported here: meanwhile another core makes the tokenizer.
            from mtpc.program.build import build
            from mtpc.program.memory_plan import check_model

            if not job.in_background:
                check = partial(check_model, owns_buffers=job.owns_buffers, early=job.early)
            plans, parts = (job.plan,), (job.ranks,)
            build(job.directory, plans, "fused", jobs, pipe.send, check, job.graphs, parts)
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


@dataclass(frozen=True)
class Rest:
    """The steps that a program still lacks.

    Attributes:
        begun: the steps that it begins with.
        source: the checkpoint.
        cache: where steps are built.
        plan: what they are built by.
        graphs: the missing steps, by ascending K.
        tiers: the numbers of drafts to choose from in the end.
    """

    begun: BuiltSteps
    source: Checkpoint
    cache: StepCache
    plan: Plan
    graphs: Graphs
    tiers: tuple[int, ...]


class Background:
    """Builds the missing steps in a process, and gives them to a program from a thread.

    `Program.building` says how far the build is. If it fails, the program goes on with the steps
    that it has, and `Program.fallbacks` says why.

    Args:
        rest: the missing steps.
        program: the program that lacks them.
        listener: gets what `Program.building` says.
    """

    def __init__(self, rest: Rest, program: Program, listener: Listener):
        self._rest, self._program, self._report = rest, program, line_reporter(listener)
        self._closed, self._ready, self._done = threading.Event(), list(program.tiers), 0
        self._missing = {k: list(g) for k, g in groupby(rest.graphs, lambda g: g[0].spec_tokens)}
        self._thread = threading.Thread(target=self._run, name="mtpc-background", daemon=True)
        self._say("builds the others in the background")
        self._thread.start()

    def close(self) -> None:
        """End the build, and wait for its process. What it has finished is in the cache."""
        self._closed.set()
        self._thread.join()

    def _say(self, what: str) -> None:
        ready = ", ".join(map(str, self._ready))
        self._program.building = what
        self._report(f"K = {ready} serves: {what}")

    def _run(self) -> None:
        try:
            self._take_finished()
            if self._missing:
                self._build()
            if self._closed.is_set() and self._missing:
                self._program.building = "the build was closed"
        except Exception as error:  # The program serves on; a dead thread alone would hide this.
            what = f"building more failed: {type(error).__name__}: {error}"
            self._program.fallbacks = Counter([what])
            self._say(what)

    def _build(self) -> None:
        rest, free = self._rest, free_bytes()
        if free is not None and free < WORKER:  # Or the system might kill a process for the memory.
            raise CapacityError(
                f"{free / 2**30:.1f} GiB of memory are free, and a building process takes some "
                f"{WORKER / 2**30:.1f}: free memory and start again, or build ahead with "
                "`mtpc build`"
            )
        graphs = [graph for graphs in self._missing.values() for graph in graphs]
        job = ChildJob(rest.source.directory.absolute(), rest.plan, graphs, in_background=True)
        _run_child(job, self._hear, self._closed.is_set)
        self._take_finished()

    def _hear(self, progress: Progress) -> None:
        if progress.done > self._done:
            self._done = progress.done
            left_s = progress.left_s
            left = "" if left_s is None else f", about {left_s:.0f} s to go"
            self._say(f"{progress.done} of {progress.total} more steps are built{left}")
            self._take_finished()

    def _take_finished(self) -> None:
        """Bind the missing steps of each K if all are in the cache, up to the first K's that are
        not."""
        rest, program = self._rest, self._program
        for tier, graphs in list(self._missing.items()):
            steps = [rest.cache.find(*graph) for graph in graphs]
            found = [step for step in steps if step is not None]
            if len(found) < len(steps) or self._closed.is_set():
                return
            start = time.perf_counter()
            binder = StepBinder(rest.begun, program.shared)
            bound = [binder.bind(step) for step in found]
            rest.begun.weights.check()
            del self._missing[tier]
            known = dict.fromkeys((*self._ready, tier))
            self._ready = [k for k in known if self._missing or k in rest.tiers]
            program.arrived.append((tuple(self._ready), bound))
            self._say(f"K = {tier} was bound in {time.perf_counter() - start:.2f} s")
        program.building = ""
