"""Builds steps while others serve: another process fills the cache, and this one binds the steps.

child process -> cache -> `Background`'s thread binds a K's steps -> `Program.arrived` -> the engine
takes them between two of its steps
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from mtpc.config import CompileOptions
from mtpc.errors import BackendError, CapacityError, MtpcError
from mtpc.layout import Graphs
from mtpc.layout.progress import Listener, line_reporter
from mtpc.program.binding import BuiltSteps, StepBinder
from mtpc.program.child_process import building_child
from mtpc.program.free_memory import free_bytes
from mtpc.program.processes import WORKER, how_it_ended
from mtpc.program.program import Program
from mtpc.program.step_cache import StepCache
from mtpc.weights.checkpoint import Checkpoint

_POLL_S = 0.1


@dataclass(frozen=True)
class Rest:
    """The steps that a program still lacks.

    Attributes:
        begun: the steps that it begins with.
        source: the checkpoint.
        cache: where steps are built.
        options: what they are built with.
        graphs: the missing steps, by ascending K.
        tiers: the numbers of drafts to choose from in the end.
    """

    begun: BuiltSteps
    source: Checkpoint
    cache: StepCache
    options: CompileOptions
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
        self._closed, self._ready = threading.Event(), list(program.tiers)
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
        rest = self._rest
        graphs = [graph for graphs in self._missing.values() for graph in graphs]
        directory = rest.source.directory.absolute()
        free = free_bytes()
        if free is not None and free < WORKER:  # Or the system might kill a process for the memory.
            raise CapacityError(
                f"{free / 2**30:.1f} GiB of memory are free, and a building process takes some "
                f"{WORKER / 2**30:.1f}: free memory and start again, or build ahead with "
                "`mtpc build`"
            )
        with building_child(directory, rest.options, graphs, in_background=True) as (process, pipe):
            done = 0
            while not self._closed.is_set():
                if not pipe.poll(_POLL_S):
                    continue
                try:
                    event = pipe.recv()
                except (EOFError, OSError):
                    break
                if isinstance(event, MtpcError):
                    raise event
                if event.done > done:
                    done = event.done
                    left = "" if event.left_s is None else f", about {event.left_s:.0f} s to go"
                    self._say(f"{done} of {len(graphs)} more steps are built{left}")
                    self._take_finished()
        if self._closed.is_set():
            return
        if process.returncode:
            raise BackendError(
                f"the building process ended with {how_it_ended(process.returncode)}"
            )
        self._take_finished()

    def _take_finished(self) -> None:
        """Bind each missing K whose steps are all in the cache, up to the first that is not."""
        rest, program = self._rest, self._program
        for tier, graphs in list(self._missing.items()):
            steps = [rest.cache.find(*graph) for graph in graphs]
            found = [step for step in steps if step is not None]
            if len(found) < len(steps) or self._closed.is_set():
                return
            start = time.perf_counter()
            binder = StepBinder(rest.begun, program.shared)
            bound = [binder.bind(step) for step in found]
            assert rest.begun.source is not None
            rest.begun.source.check()
            del self._missing[tier]
            self._ready = [k for k in (*self._ready, tier) if self._missing or k in rest.tiers]
            program.arrived.append((tuple(self._ready), bound))
            self._say(f"K = {tier} was bound in {time.perf_counter() - start:.2f} s")
        program.building = ""
