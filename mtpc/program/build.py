"""Building steps: in this process, of one program or of several, and ahead of time by several
processes.

A `Job` is a program whose steps are to be built, a `Task` one step of it. `Builder` has a compiler
for each job, and gives its steps, from the cache or built. `mtpc.compile` builds what it lacks by
one job. `build` fills the cache: this process loads a model's headers and traces the model; then it
and its workers, which begin as copies of it, take tasks from a common queue. They share the cache
alone, and its locks let any other builder join in.

`build_for_targets` builds for GPUs that are not here: it traces steps as far as legalise-gpu, and
compiles their launches in every configuration that a device may choose, one cache entry for each
distinct kernel and target. Inductor compiles the operations between mtpc's kernels on the device's
own machine, because it asks the device for its properties.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpc.backends import PACKAGING, make_backend
from mtpc.backends.base import Backend
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.errors import BackendError, CacheWriteError, OptionError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys, largest_first
from mtpc.layout.progress import Listener, Progress, Report, line_reporter
from mtpc.models.load import LoadedModel, load_planned
from mtpc.plan import Plan
from mtpc.program.compiler import Begins, StepCompiler
from mtpc.program.forecast import Forecast, seconds_of_nearest
from mtpc.program.open_cache import open_cache, pin_of
from mtpc.program.processes import default_jobs
from mtpc.program.step_cache import CachedStep, OwnSteps, Steps
from mtpc.store.entries import Entry, EntryStore
from mtpc.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from mtpc.backends.targets import Target
    from mtpc.backends.triton_kernels.crosscompile import Compiled
    from mtpc.backends.triton_kernels.launch import Launch
    from mtpc.program.workers import Tell
    from mtpc.ranks.group import Ranks

Check = Callable[[StepCompiler], None]
"""Raises MtpcError to refuse a model."""


@dataclass(frozen=True)
class Task:
    """One step to build: the number of its job, which step, which part of it."""

    job: int
    key: StepKey
    part: Part = "step"


@dataclass(frozen=True)
class Job:
    """A program of which steps are to be built.

    Attributes:
        source: an opened `Checkpoint`, or a model object.
        plan: of the program.
        cache: where its steps are looked up and kept.
        ranks: whose part of the steps it has; None: the whole.
    """

    source: Any
    plan: Plan
    cache: OwnSteps
    ranks: Ranks | None = None


MakeCompiler = Callable[[Job, Begins], StepCompiler]
"""Makes the compiler of a job, which says what it begins."""


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
        directory: the checkpoint, or its id on the Hugging Face hub.
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
    start, line = time.perf_counter(), line_reporter(listener)
    sources = [open_checkpoint(directory, plan.drafter) for plan in plans]
    store, programs, tasks = EntryStore(plans[0].cache_dir), list[Job](), list[Task]()
    for ranks in parts:
        for plan, source in zip(plans, sources, strict=True):
            cache = open_cache(source, plan, line, ranks)
            if cache is None:
                raise OptionError("building ahead of time needs the cache; drop use_cache=False")
            tasks += [Task(len(programs), *graph) for graph in graphs or graph_keys(plan, form)]
            programs.append(Job(source, plan, cache, ranks))
    there = {task for task in tasks if programs[task.job].cache.find(task.key, task.part)}
    todo = [task for task in tasks if task not in there]
    if todo:
        store.prepare()
    kernels = build_kernels(store, line)
    count = min(jobs or default_jobs(), len(todo))
    backend = make_backend(PACKAGING, line, store)
    make = FromHeaders(backend, check or (lambda compiler: None))
    teller = Teller(listener, programs, todo, count)
    builder = Builder(programs, make, teller)
    if count > 1:
        # All workers begin with what steps of this program share.
        builder.compiler(todo[0]).prepare(todo[0].key)
        from mtpc.program.workers import build_beside_workers  # Not above: few builds are here.

        build_beside_workers(builder, todo, count - 1, teller)
    else:
        builder.run(iter(todo))
    return _report(store.root, programs, tasks, there, kernels, time.perf_counter() - start)


def _report(
    root: Path,
    jobs: Sequence[Job],
    tasks: Sequence[Task],
    there: set[Task],
    kernels: Entry | Path,
    elapsed_s: float,
) -> BuildReport:
    """Read the cache again, to report what a warm start will find."""
    found = {task: jobs[task.job].cache.find(task.key, task.part) for task in tasks}
    missing = [task for task, step in found.items() if step is None]
    if missing or not isinstance(kernels, Entry):
        lacking = [f"{len(missing)} of {len(tasks)} steps"] * bool(missing)
        lacking += ["the kernels"] * (not isinstance(kernels, Entry))
        raise CacheWriteError(
            f"{' and '.join(lacking)} are built but not in the cache {root}: it cannot be written, "
            "or somebody removes entries from it"
        )
    steps = {task: step for task, step in found.items() if step is not None}
    programs: dict[int, list[dict[tuple[StepKey, Part], CachedStep]]] = defaultdict(list)
    for number, job in enumerate(jobs):
        own = {(t.key, t.part): step for t, step in steps.items() if t.job == number}
        whole = {graph: step for graph, step in own.items() if graph[1] == "step"}
        programs[job.plan.spec_tokens].append(whole)
    pins = {k: pin_of(kernels, *programs[k]) for k in sorted(programs)}
    built = (Built(step, task in there, jobs[task.job].ranks) for task, step in steps.items())
    return BuildReport(root, kernels, tuple(built), pins, elapsed_s)


class Teller:
    """Reports events of a build as `Progress`, and counts finished steps.

    Args:
        listener: called with progress.
        jobs: the programs, in whose caches the nearest entries say how long each stage should take.
        todo: their steps that are to be built.
        workers: processes that build.
    """

    def __init__(
        self, listener: Listener, jobs: Sequence[Job], todo: Sequence[Task], workers: int = 1
    ):
        self._listener, self._start = listener, time.perf_counter()
        self._done, self._todo = 0, frozenset(todo)
        expected: dict[Task, Mapping[str, float]] = {}
        for number, job in enumerate(jobs):
            own = [task for task in todo if task.job == number]
            seconds = seconds_of_nearest(job.cache, [(task.key, task.part) for task in own])
            expected |= zip(own, seconds, strict=True)
        self._forecast = Forecast(expected, workers)
        self.line: Report = line_reporter(listener)

    def __call__(self, stage: str, task: Task | None) -> None:
        key, name = None, stage
        if task is not None:
            self._forecast.begins(task, stage)
            key, name = task.key, f"{stage} {task.part}" if task.part != "step" else stage
        done = (self._done, len(self._todo), time.perf_counter() - self._start)
        self._listener(Progress(name, key, *done, *self._forecast.now()))

    def finished(self, task: Task) -> None:
        """A step is built, or was there."""
        self._forecast.finished(task)
        self._done += task in self._todo

    @property
    def is_done(self) -> bool:
        """Whether every step is built."""
        return self._done == len(self._todo)


class Builder:
    """Builds tasks in one process.

    Args:
        jobs: the programs whose tasks these are.
        make: makes the compiler of a job, once.
        tell: called with progress.

    Attributes:
        tell: a worker, which begins as a copy of this process, puts its own in its place.
    """

    def __init__(self, jobs: Sequence[Job], make: MakeCompiler, tell: Tell):
        self._jobs, self._make, self.tell = jobs, make, tell
        self._compilers: dict[int, StepCompiler] = {}

    def run(self, tasks: Iterator[Task]) -> None:
        """Build tasks into the cache until there are none left."""
        for task in tasks:
            if self.obtain(task).entry is None:
                # The next step could not be kept either, and would take minutes.
                raise CacheWriteError("; ".join(self.compiler(task).cache.notes))

    def obtain(self, task: Task) -> CachedStep:
        """The step of a task, built if the cache lacks it."""
        step = self.compiler(task).obtain(task.key, task.part)
        self.tell.finished(task)
        return step

    def compiler(self, task: Task) -> StepCompiler:
        """The compiler of a task's program."""
        if task.job not in self._compilers:
            begins = partial(self._begins, task.job)
            self._compilers[task.job] = self._make(self._jobs[task.job], begins)
        return self._compilers[task.job]

    def _begins(self, job: int, stage: str, key: StepKey | None, part: Part) -> None:
        self.tell(stage, None if key is None else Task(job, key, part))


@dataclass
class FromHeaders:
    """Makes compilers without weights, of checkpoints' headers; a model is loaded once.

    Attributes:
        backend: of all steps; its artifacts are files.
        check: sees each model before it is traced.
    """

    backend: Backend
    check: Check
    _models: dict[bool, LoadedModel] = field(default_factory=dict)

    def __call__(self, job: Job, begins: Begins) -> StepCompiler:
        has_mtp = job.plan.layer_drafts > 0
        if has_mtp not in self._models:
            begins("load the model", None, "step")
            self._models[has_mtp] = load_planned(job.source, job.plan, headers_only=True)
        of_job = (job.plan, self.backend, begins, Layout.reserve, job.ranks, job.cache)
        compiler = StepCompiler(self._models[has_mtp], *of_job)
        self.check(compiler)
        return compiler


def build_here(
    job: Job, graphs: Graphs, make: MakeCompiler, listener: Listener
) -> tuple[Steps, StepCompiler]:
    """Every step of one program in order, from the cache or built; and their compiler."""
    tasks = [Task(0, *graph) for graph in graphs]
    lacking = [task for task in tasks if job.cache.lacks(task.key, task.part)]
    builder = Builder((job,), make, Teller(listener, (job,), lacking))
    steps = {(task.key, task.part): builder.obtain(task) for task in tasks}
    return steps, builder.compiler(tasks[0])


@dataclass(frozen=True)
class CrossReport:
    """What `build_for_targets` leaves in the cache.

    Attributes:
        root: the cache directory.
        kernels: each distinct kernel and configuration per target.
        launches: number of launches of mtpc's kernels in each step.
        notes: ops that no kernel takes, and configurations that a target refuses, with the reasons.
        elapsed_s: seconds it took.
    """

    root: Path
    kernels: tuple[Compiled, ...]
    launches: dict[StepKey, int]
    notes: Counter[str]
    elapsed_s: float


def build_for_targets(
    directory: Path,
    plans: Sequence[Plan],
    targets: Sequence[Target],
    listener: Listener = lambda progress: None,
) -> CrossReport:
    """Compile the Triton kernels of a checkpoint's steps for devices that need not be here.

    Args:
        directory: the checkpoint.
        plans: of programs for backend cuda, for different numbers of drafts, otherwise alike.
        targets: devices.
        listener: called with progress.

    Raises:
        BackendError: there is no Triton, or it refuses a kernel.
        CacheWriteError: the cache cannot be written.
        MtpcError: as `mtpc.compile`.
    """
    # Imported here: a build for this machine's CPU needs no Triton.
    from mtpc.backends.cuda import CrossBackend
    from mtpc.backends.triton_kernels.plans import step_launches

    start, (first, *_) = time.perf_counter(), plans
    store, backend = EntryStore(first.cache_dir), CrossBackend(first.batch_invariant)
    store.prepare()
    kernels: dict[tuple[str, str], Compiled] = {}
    counts: dict[StepKey, int] = {}
    for plan in plans:
        loaded = load_planned(directory, plan, headers_only=True)
        compiler = StepCompiler(loaded, plan, backend, new_buffer=Layout.reserve)
        compiler.weights.defers = True
        for done, key in enumerate(largest_first(compiler.keys)):
            launches = step_launches(compiler.rewritten(key))
            counts[key] = len(launches)
            for target in targets:
                said = (f"compile for {target.name}", key, done, len(compiler.keys))
                listener(Progress(*said, time.perf_counter() - start))
                for made in _for_target(launches, target, store, backend.notes):
                    kernels.setdefault((target.name, made.entry.digest), made)
    elapsed = time.perf_counter() - start
    return CrossReport(store.root, tuple(kernels.values()), counts, backend.notes, elapsed)


def _for_target(
    launches: list[Launch], target: Target, store: EntryStore, notes: Counter[str]
) -> Iterator[Compiled]:
    """Every launch in every configuration; a target may refuse any but the default."""
    from mtpc.backends.triton_kernels.configs import all_configured
    from mtpc.backends.triton_kernels.crosscompile import cross_compile

    for launch, is_default in all_configured(launches, target.vendor):
        try:
            yield from cross_compile([launch], target, store)
        except BackendError as error:
            if is_default:
                raise
            notes[f"left out: {error}"] += 1
