"""Filling the cache ahead of time: every step of one checkpoint, several at once.

Each worker is a process that loads the model's headers and takes steps from a common queue. Workers
share the cache alone, and its locks let any other builder join in. No worker reads weights.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtpc import errors
from mtpc.backends import PACKAGING, make_backend, settle_prefill
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.config import CompileOptions
from mtpc.errors import BackendError, CacheWriteError, MtpcError, OptionError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys
from mtpc.layout.progress import Listener, Progress, Report, line_reporter
from mtpc.models.load import LoadedModel, load
from mtpc.program.caching_compiler import CachingCompiler
from mtpc.program.compiler import StepCompiler
from mtpc.program.forecast import Forecast, Graph
from mtpc.program.free_memory import free_bytes
from mtpc.program.open_cache import open_cache
from mtpc.program.processes import (
    WORKER,
    end_with_parent,
    ended_by_sigterm,
    how_it_ended,
)
from mtpc.program.ranks import Ranks
from mtpc.program.restore import pin_of
from mtpc.program.step_cache import CachedStep, StepCache
from mtpc.store.entries import Entry
from mtpc.weights.paired_checkpoint import open_checkpoint

Check = Callable[[StepCompiler], None]
"""May refuse a model. It is sent to other processes."""
_POLL_S = 0.2
_GRACE_S = 10.0
"""Seconds that a worker has to clean up, once it was told to end."""


@dataclass(frozen=True)
class Task:
    """One entry to build: for which K, which step, which part of it, for which rank."""

    spec_tokens: int
    key: StepKey
    part: Part = "step"
    ranks: Ranks | None = None

    @property
    def program(self) -> tuple[int, Ranks | None]:
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
    job = _Job(directory, options, torch.get_num_threads(), check)
    tell = _Teller(listener, start)
    tasks = [
        Task(k, key, part, ranks)
        for ranks in parts
        for k in spec_tokens
        for key, part in graphs or graph_keys(replace(options, spec_tokens=k), form)
    ]
    caches = {task.program: job.cache(*task.program) for task in tasks}
    there = {t for t in tasks if caches[t.program].find(t.key, t.part)}
    todo = [task for task in tasks if task not in there]
    store = caches[tasks[0].program].store
    if todo:
        store.prepare()
    kernels = build_kernels(store, tell.line)
    workers = min(jobs or default_jobs(), len(todo))
    tell.expect(_expected(caches, todo), workers)
    if workers > 1:
        _build_in_processes(job, todo, workers, tell)
    else:
        job.run(iter(todo), tell)
    return _report(caches, tasks, there, kernels, time.perf_counter() - start)


def _expected(
    caches: Mapping[tuple[int, Ranks | None], StepCache], todo: list[Task]
) -> dict[Graph, Mapping[str, float]]:
    """What each stage of each task took in the nearest entry."""
    expected: dict[Graph, Mapping[str, float]] = {}
    for program, cache in caches.items():
        tasks = [task for task in todo if task.program == program]
        seconds = cache.seconds_of_nearest((task.key, task.part) for task in tasks)
        expected |= zip((task.graph for task in tasks), seconds, strict=True)
    return expected


def _report(
    caches: dict[tuple[int, Ranks | None], StepCache],
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


class _Teller:
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


@dataclass(frozen=True)
class _Job:
    """What every worker needs to know. It is sent to other processes."""

    directory: Path
    options: CompileOptions
    threads: int
    check: Check | None

    def cache(
        self,
        spec_tokens: int,
        ranks: Ranks | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> StepCache:
        """The cache of the program for one K, and one rank."""
        options = replace(self.options, spec_tokens=spec_tokens)
        cache = open_cache(open_checkpoint(self.directory, options.drafter), options, tell, ranks)
        if cache is None:
            raise OptionError("building ahead of time needs the cache; drop use_cache=False")
        return cache

    def run(self, tasks: Iterator[Task], tell: Any) -> None:
        """Build tasks until there are none left."""
        torch.set_num_threads(self.threads)
        compilers: dict[tuple[int, Ranks | None], CachingCompiler] = {}
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
        cache = self.cache(*task.program, tell.line)
        backend = make_backend(PACKAGING, tell.line, cache.store)
        options = replace(self.options, spec_tokens=task.spec_tokens)
        reserve, ranks = Layout.reserve, task.ranks
        compiler = StepCompiler(loaded, options, backend, new_buffer=reserve, ranks=ranks)
        if self.check is not None:
            self.check(compiler)
        return CachingCompiler(compiler, cache)


def _pass_on(tell: Any, task: Task, progress: Progress) -> None:
    """A compiler's progress, as progress of the build."""
    tell(progress.stage, task)


class _Remote:
    """A worker's side of `_Teller`: sends what it is told to the parent."""

    def __init__(self, events: Any):
        self._events = events

    def __call__(self, stage: str, task: Task) -> None:
        self._events.put(("tell", (stage, task)))

    def line(self, text: str, fraction: float | None = None, /) -> None:
        """A line that concerns no step."""
        self._events.put(("line", (text, fraction)))

    def finished(self, task: Task) -> None:
        """One more step is in the cache."""
        self._events.put(("finished", (task,)))


def _work(job: _Job, tasks: Any, events: Any) -> None:
    """A worker process."""
    end_with_parent()
    try:
        with ended_by_sigterm():
            job.run(_drain(tasks), _Remote(events))
    except MtpcError as error:
        events.put(("error", (type(error).__name__, str(error))))


def _drain(tasks: Any) -> Iterator[Task]:
    """Tasks until the queue says stop, or the process that wants them has ended."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        try:
            task = tasks.get(timeout=1)
        except queue.Empty:
            continue
        if task is None:
            return
        yield task


def _build_in_processes(job: _Job, todo: list[Task], workers: int, tell: _Teller) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, events = context.Queue(), context.Queue()
    for task in [*todo, *[None] * workers]:
        tasks.put(task)
    processes = [
        context.Process(target=_work, args=(job, tasks, events), daemon=True)
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes) or not events.empty():
            _handle(events, tell)
            _check_alive(processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _handle(events: Any, tell: _Teller) -> None:
    """Pass on one event of a worker, if there is one."""
    try:
        kind, data = events.get(timeout=_POLL_S)
    except queue.Empty:
        return
    if kind == "tell":
        tell(*data)
    elif kind == "line":
        tell.line(*data)
    elif kind == "finished":
        tell.finished(*data)
    else:
        name, message = data
        raise getattr(errors, name)(message)


def _check_alive(processes: list[Any]) -> None:
    """End the build if a worker died without an error, usually for want of memory."""
    dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
    if dead:
        raise BackendError(
            f"a building process ended with {how_it_ended(dead[0])}; what it had finished "
            "is in the cache"
        )
