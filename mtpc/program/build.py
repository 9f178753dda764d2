"""Filling the cache ahead of time: every step of one checkpoint, several at once.

This process and its workers load the model's headers and take steps from a common queue. They share
the cache alone, and its locks let any other builder join in. None of them reads weights.

What tracing needs is imported where tracing begins: workers start before this process imports it,
so all of them import it at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpc.backends import PACKAGING, make_backend, settle_prefill
from mtpc.backends.cpu_kernels import build_kernels, load_library
from mtpc.config import CompileOptions
from mtpc.errors import CacheWriteError, OptionError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys
from mtpc.layout.progress import Listener, Progress, Report, line_reporter
from mtpc.program.forecast import Forecast, Graph
from mtpc.program.free_memory import free_bytes
from mtpc.program.open_cache import open_cache, open_store
from mtpc.program.processes import WORKER
from mtpc.program.ranks import Ranks
from mtpc.program.restore import pin_of
from mtpc.program.step_cache import CachedStep, StepCache
from mtpc.program.workers import Workers
from mtpc.store.entries import Entry
from mtpc.store.key import Fields
from mtpc.weights.paired_checkpoint import open_checkpoint

if TYPE_CHECKING:
    from mtpc.models.load import LoadedModel
    from mtpc.program.caching_compiler import CachingCompiler
    from mtpc.program.compiler import StepCompiler

Check = Callable[["StepCompiler"], None]
"""May refuse a model. It is sent to other processes."""
_Program = tuple[int, Ranks | None]
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
    options: CompileOptions,
    spec_tokens: tuple[int, ...],
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
        options: as for `mtpc.compile`; its `spec_tokens` has no effect.
        spec_tokens: the numbers of drafts to build for.
        form: which graphs; "both" serves engines and hosts that schedule.
        jobs: processes; None is one a core, as far as memory holds them.
        listener: hears of progress.
        check: sees each model before it is traced, and may refuse it.
        graphs: only these, in this order; None is all of `form`.
        parts: the ranks whose parts of the steps to build; None is the whole.

    Raises:
        CacheWriteError: the cache cannot be written.
        MtpcError: as `mtpc.compile`.
    """
    start = time.perf_counter()
    source = open_checkpoint(directory, options.draft)
    directory = source.directory
    options = settle_prefill(replace(options, backend=PACKAGING), source.dtype)
    tell = Teller(listener, start)
    tasks = [
        Task(k, key, part, ranks)
        for ranks in parts
        for k in spec_tokens
        for key, part in graphs or graph_keys(replace(options, spec_tokens=k), form)
    ]
    caches = {task.program: _open_cache(directory, options, *task.program) for task in tasks}
    there = {t for t in tasks if caches[t.program].find(t.key, t.part)}
    todo = [task for task in tasks if task not in there]
    store = caches[tasks[0].program].store
    if todo:
        store.prepare()
    kernels = build_kernels(store, tell.line)
    workers = min(jobs or default_jobs(), len(todo))
    tell.expect(_expected(caches, todo), workers)
    keys = {program: cache.program for program, cache in caches.items()}
    job = Job(directory, options, torch.get_num_threads(), check, keys, kernels)
    if workers > 1:
        _build_beside_workers(job, todo, workers - 1, tell)
    else:
        job.run(iter(todo), tell)
    return _report(caches, tasks, there, kernels, time.perf_counter() - start)


def _open_cache(
    directory: Path, options: CompileOptions, spec_tokens: int, ranks: Ranks | None
) -> StepCache:
    """The cache of the program for one K, and one rank."""
    options = replace(options, spec_tokens=spec_tokens)
    source = open_checkpoint(directory, options.drafter)
    cache = open_cache(source, options, lambda line: None, ranks)
    if cache is None:
        raise OptionError("building ahead of time needs the cache; drop use_cache=False")
    return cache


def _expected(
    caches: Mapping[_Program, StepCache], todo: list[Task]
) -> dict[Graph, Mapping[str, float]]:
    """What each stage of each task took in the nearest entry."""
    expected: dict[Graph, Mapping[str, float]] = {}
    for program, cache in caches.items():
        tasks = [task for task in todo if task.program == program]
        seconds = cache.seconds_of_nearest((task.key, task.part) for task in tasks)
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
        raise CacheWriteError(
            f"{len(missing)} of {len(tasks)} steps were built but are not in the cache {root}: "
            "it cannot be written, or somebody removes entries from it"
        )
    steps = {task: step for task, step in found.items() if step is not None}
    pins = {
        k: pin_of(
            kernels,
            {
                (t.key, t.part): s
                for t, s in steps.items()
                if t.program == (k, None) and t.part == "step"
            },
        )
        for k in sorted({task.spec_tokens for task in tasks if task.ranks is None})
    }
    built = tuple(Built(step, task in there, task.ranks) for task, step in steps.items())
    return BuildReport(root, kernels, built, pins, elapsed_s)


def default_jobs() -> int:
    """One process for each core, or fewer if the free memory does not hold so many."""
    free = free_bytes()
    fit = free // WORKER if free is not None else 1
    return max(1, min(os.cpu_count() or 1, fit))


class Teller:
    """Turns what happens into `Progress`; counts what is done."""

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


@dataclass(frozen=True)
class Job:
    """What every builder needs to know. It is sent to other processes.

    Attributes:
        directory: the checkpoint.
        options: for all K.
        threads: of torch.
        check: sees each model before it is traced.
        keys: what the keys of a program's steps share.
        kernels: what `build_kernels` returned.
    """

    directory: Path
    options: CompileOptions
    threads: int
    check: Check | None
    keys: Mapping[_Program, Fields]
    kernels: Entry | Path

    def run(self, tasks: Iterator[Task], tell: Any) -> None:
        """Build tasks until there are none left."""
        from mtpc.models.load import load

        torch.set_num_threads(self.threads)
        load_library(self.kernels)
        compilers: dict[_Program, CachingCompiler] = {}
        models: dict[bool, LoadedModel] = {}
        for task in tasks:
            k = task.spec_tokens
            if task.program not in compilers:
                if (k > 0) not in models:
                    tell("load the model", task)
                    options = self.options
                    models[k > 0] = load(
                        *(self.directory, options.dtype, k > 0, options.wiring),
                        headers_only=True,
                        draft=options.draft,
                    )
                compilers[task.program] = self._compiler(task, models[k > 0], tell)
            compiler = compilers[task.program]
            compiler.compiler.listener = partial(_pass_on, tell, task)
            if compiler.obtain(task.key, task.part).entry is None:
                # The next step could not be kept either, after minutes of work.
                raise CacheWriteError("; ".join(compiler.cache.notes))
            tell.finished(task)

    def _compiler(self, task: Task, loaded: LoadedModel, tell: Any) -> CachingCompiler:
        from mtpc.program.caching_compiler import CachingCompiler
        from mtpc.program.compiler import StepCompiler

        options = replace(self.options, spec_tokens=task.spec_tokens)
        cache = StepCache(open_store(options), self.keys[task.program], options, tell.line)
        backend = make_backend(PACKAGING, tell.line, cache.store)
        reserve, ranks = Layout.reserve, task.ranks
        compiler = StepCompiler(loaded, options, backend, new_buffer=reserve, ranks=ranks)
        if self.check is not None:
            self.check(compiler)
        return CachingCompiler(compiler, cache)


def _pass_on(tell: Any, task: Task, progress: Progress) -> None:
    """A compiler's progress, as progress of the build."""
    tell(progress.stage, task)


def _build_beside_workers(job: Job, todo: list[Task], count: int, tell: Teller) -> None:
    """Build tasks in this process, and in so many workers."""
    workers = Workers(job, todo, count, tell)
    try:
        job.run(workers.tasks(), workers)
        workers.wait()
    finally:
        workers.end()
