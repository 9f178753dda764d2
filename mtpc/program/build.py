"""Filling the cache ahead of time: every step of one checkpoint, several at once.

This process loads a model's headers and traces the model. Then it and its workers, which begin as
copies of it, take steps from a common queue. They share the cache alone, and its locks let any
other builder join in. None of them reads weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mtpc.backends import PACKAGING, make_backend
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.errors import CacheWriteError, OptionError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys
from mtpc.layout.progress import Listener, Progress, Report, line_reporter
from mtpc.models.load import LoadedModel, load_planned
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler
from mtpc.program.open_cache import open_cache, pin_of
from mtpc.program.processes import WORKER, free_bytes
from mtpc.program.step_cache import CachedStep, StepCache
from mtpc.program.step_record import Forecast, Graph
from mtpc.program.workers import Tell, build_beside_workers
from mtpc.store.entries import Entry
from mtpc.weights.paired_checkpoint import open_checkpoint

if TYPE_CHECKING:
    from mtpc.program.ranks import Ranks

Check = Callable[[StepCompiler], None]
"""Raises MtpcError to refuse a model."""
_Program: TypeAlias = "tuple[int, Ranks | None]"
"""K, and the rank whose part of the steps it has."""


@dataclass(frozen=True)
class Task:
    """One entry to build: for which K, which step, which part of it, for which rank."""

    spec_tokens: int
    key: StepKey
    part: Part = "step"
    ranks: Ranks | None = None

    @property
    def program(self) -> _Program:
        """The program that it belongs to: K, and the rank."""
        return self.spec_tokens, self.ranks

    @property
    def graph(self) -> Graph:
        """Its name in a forecast."""
        return self.spec_tokens, self.key, self.part


@dataclass(frozen=True)
class Built:
    """One step of the finished cache.

    Attributes:
        step: its entry.
        was_there: it had been built before.
        ranks: whose part it is; None: the whole.
    """

    step: CachedStep
    was_there: bool
    ranks: Ranks | None = None


@dataclass(frozen=True)
class BuildReport:
    """What `build` leaves in the cache.

    Attributes:
        root: the cache directory.
        kernels: the kernel library's entry.
        steps: all steps asked for.
        pins: K -> digest for the option `require_sha256`.
        elapsed_s: seconds it took.
    """

    root: Path
    kernels: Entry
    steps: tuple[Built, ...]
    pins: dict[int, str]
    elapsed_s: float


def build(
    directory: Path,
    plans: Sequence[Plan],
    form: Form = "fused",
    jobs: int | None = None,
    listener: Listener = lambda progress: None,
    check: Check | None = None,
    graphs: Graphs | None = None,
    parts: Sequence[Ranks | None] = (None,),
) -> BuildReport:
    """Compile every step of a checkpoint into the cache.

    Args:
        directory: the checkpoint, or its id in the local hub cache.
        plans: of programs for different numbers of drafts, otherwise alike.
        form: which graphs; "both" serves engines and hosts that schedule.
        jobs: processes; None is one a core, as far as memory holds them.
        listener: called with progress.
        check: sees each model before it is traced, and may refuse it.
        graphs: only these, in this order; None is all of `form`.
        parts: the ranks whose parts of the steps to build; None is the whole.

    Raises:
        CacheWriteError: the cache cannot be written.
        MtpcError: as `mtpc.compile`.
    """
    start = time.perf_counter()
    tell = Teller(listener, start)
    builder = Builder(directory, plans, check, tell)
    tasks = [
        Task(plan.spec_tokens, key, part, ranks)
        for ranks in parts
        for plan in plans
        for key, part in graphs or graph_keys(plan, form)
    ]
    caches = {program: builder.open_cache(*program) for program in {t.program: None for t in tasks}}
    there = {t for t in tasks if caches[t.program].find(t.key, t.part)}
    todo = [task for task in tasks if task not in there]
    store = caches[tasks[0].program].store
    if todo:
        store.prepare()
    kernels = build_kernels(store, tell.line)
    count = min(jobs or default_jobs(), len(todo))
    tell.expect(_expected(caches, todo), count)
    if count > 1:
        builder.prepare(todo[0])
        build_beside_workers(builder, todo, count - 1, tell)
    else:
        builder.run(iter(todo))
    return _report(caches, tasks, there, kernels, time.perf_counter() - start)


def _expected(
    caches: Mapping[_Program, StepCache], todo: list[Task]
) -> dict[Graph, Mapping[str, float]]:
    """What each stage of each task took in the nearest entry."""
    expected: dict[Graph, Mapping[str, float]] = {}
    for program, cache in caches.items():
        tasks = [task for task in todo if task.program == program]
        seconds = cache.seconds_of_nearest([(task.key, task.part) for task in tasks])
        expected |= zip((task.graph for task in tasks), seconds, strict=True)
    return expected


def _report(
    caches: dict[_Program, StepCache],
    tasks: list[Task],
    there: set[Task],
    kernels: Entry | Path,
    elapsed_s: float,
) -> BuildReport:
    """Read the cache again, to report what a warm start will find."""
    found = {task: caches[task.program].find(task.key, task.part) for task in tasks}
    missing = [task for task, step in found.items() if step is None]
    root = caches[tasks[0].program].store.root
    if missing or not isinstance(kernels, Entry):
        lacking = [f"{len(missing)} of {len(tasks)} steps"] * bool(missing)
        lacking += ["the kernels"] * (not isinstance(kernels, Entry))
        raise CacheWriteError(
            f"{' and '.join(lacking)} are built but not in the cache {root}: it cannot be written, "
            "or somebody removes entries from it"
        )
    steps = {task: step for task, step in found.items() if step is not None}
    parts: dict[_Program, dict[tuple[StepKey, Part], CachedStep]] = {
        program: {} for program in caches
    }
    for task, step in steps.items():
        if task.part == "step":
            parts[task.program][task.key, task.part] = step
    pins = {
        k: pin_of(kernels, *(part for (own, _), part in parts.items() if own == k))
        for k in sorted({k for k, _ in caches})
    }
    built = tuple(Built(step, task in there, task.ranks) for task, step in steps.items())
    return BuildReport(root, kernels, built, pins, elapsed_s)


def default_jobs() -> int:
    """One process for each core, or fewer if the free memory does not hold so many.

    Only on Linux can a process be copied safely.
    """
    if sys.platform != "linux":
        return 1
    free = free_bytes()
    fit = free // WORKER if free is not None else 1
    return max(1, min(os.cpu_count() or 1, fit))


class Teller:
    """Reports events of a build as `Progress`, and counts finished steps."""

    def __init__(self, listener: Listener, start: float):
        self._listener, self._start = listener, start
        self._done, self._total, self._forecast = 0, 0, Forecast()
        self.line: Report = line_reporter(listener)

    def expect(self, expected: Mapping[Graph, Mapping[str, float]], workers: int) -> None:
        """Building begins: the seconds that each graph should take, and the number of workers."""
        self._total, self._forecast = len(expected), Forecast(expected, workers)

    def __call__(self, stage: str, task: Task) -> None:
        self._forecast.begins(task.graph, stage)
        name = f"{stage} {task.part}" if task.part != "step" else stage
        done = (self._done, self._total, time.perf_counter() - self._start)
        self._listener(Progress(name, task.key, *done, *self._forecast.now()))

    def finished(self, task: Task) -> None:
        """One more step is in the cache."""
        self._forecast.finished(task.graph)
        self._done += 1

    @property
    def is_done(self) -> bool:
        """Whether every step is in the cache."""
        return self._done == self._total


class Builder:
    """Builds tasks in one process.

    Args:
        directory: the checkpoint, or its id in the local hub cache.
        plans: of the programs, for different K.
        check: sees each model before it is traced.
        tell: called with progress.

    Attributes:
        tell: a worker, which begins as a copy of this process, puts its own in its place.
    """

    def __init__(self, directory: Path, plans: Sequence[Plan], check: Check | None, tell: Tell):
        self._plans = {plan.spec_tokens: plan for plan in plans}
        self._sources = {
            k: open_checkpoint(directory, plan.drafter) for k, plan in self._plans.items()
        }
        self._check, self.tell = check, tell
        self._caches: dict[_Program, StepCache] = {}
        self._models: dict[bool, LoadedModel] = {}
        self._compilers: dict[_Program, StepCompiler] = {}

    def open_cache(self, spec_tokens: int, ranks: Ranks | None = None) -> StepCache:
        """The cache of the program for one K, and one rank."""
        source, plan = self._sources[spec_tokens], self._plans[spec_tokens]
        cache = open_cache(source, plan, self._line, ranks)
        if cache is None:
            raise OptionError("building ahead of time needs the cache; drop use_cache=False")
        self._caches[spec_tokens, ranks] = cache
        return cache

    def prepare(self, task: Task) -> None:
        """Trace the model of a task's program, which all steps of the program share."""
        self._compiler(task).prepare(task.key)

    def run(self, tasks: Iterator[Task]) -> None:
        """Build tasks until there are none left."""
        for task in tasks:
            compiler = self._compiler(task)
            if compiler.obtain(task.key, task.part).entry is None:
                # The next step could not be kept either, and would take minutes.
                raise CacheWriteError("; ".join(compiler.cache.notes))
            self.tell.finished(task)

    def _compiler(self, task: Task) -> StepCompiler:
        """The compiler of a task's program, whose progress is that of the task from now on."""
        if task.program not in self._compilers:
            self._compilers[task.program] = self._new_compiler(task)
        compiler = self._compilers[task.program]
        compiler.listener = lambda progress: self.tell(progress.stage, task)
        return compiler

    def _new_compiler(self, task: Task) -> StepCompiler:
        cache, loaded = self._caches[task.program], self._model(task)
        backend = make_backend(PACKAGING, self._line, cache.store)
        plan, reserve, ranks = self._plans[task.spec_tokens], Layout.reserve, task.ranks
        compiler = StepCompiler(loaded, plan, backend, new_buffer=reserve, ranks=ranks, cache=cache)
        if self._check is not None:
            self._check(compiler)
        return compiler

    def _model(self, task: Task) -> LoadedModel:
        """The model of a task, with MTP layers or without."""
        k = task.spec_tokens
        has_mtp = self._plans[k].layer_drafts > 0
        if has_mtp not in self._models:
            self.tell("load the model", task)
            given = self._sources[k], self._plans[k]
            self._models[has_mtp] = load_planned(*given, headers_only=True)
        return self._models[has_mtp]

    def _line(self, text: str, fraction: float | None = None, /) -> None:
        self.tell.line(text, fraction)
