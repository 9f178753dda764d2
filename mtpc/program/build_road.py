"""Building what the cache lacks, which a warm start leaves out: see `mtpc.program.open_steps`.

Steps are built without weights, from a checkpoint's headers, and bound to its files. Only where
that is not possible, they are built from a loaded model: a model object, weights that transformers
alone can read, and backends whose artifacts are no files.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from mtpc.backends import choose_backend
from mtpc.environment import free_bytes
from mtpc.layout import Layout, Part, StepKey, graph_keys
from mtpc.layout.progress import Listener, Progress, line_reporter
from mtpc.layout.slot_state import snapshot_count
from mtpc.plan import Plan
from mtpc.program.open_cache import from_files, kernel_store
from mtpc.program.open_steps import Opened, Prepared, Road
from mtpc.program.processes import WORKER, without_collections
from mtpc.program.step_cache import OwnSteps, StepCache
from mtpc.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.models.load import LoadedModel
    from mtpc.program.build import Job
    from mtpc.program.compiler import Begins, StepCompiler

T = TypeVar("T")
IMPATIENT_S = 1.0
"""A second Ctrl-C takes effect at once if it comes this many seconds after the first."""
LARGE = 256 * 2**20
"""From so many bytes of weights on, a process is worth the four seconds that it takes to start."""


def open_built(road: Road[T], cache: StepCache | None) -> Opened[T]:
    """Build what the cache lacks, and bind all steps."""
    model = None
    if road.plan.build_in_background:
        road = beginning(road, cache)
        model = road.look_up(cache)
    model = model or built_in_child(road, cache)
    if model is not None:
        return road.bound(model, cache)
    interrupts = HeldInterrupts(road.listener)
    report = line_reporter(interrupts.tell)
    road = replace(road, listener=interrupts.tell, report=report)
    # The backend comes first: a missing GPU must be reported before minutes of loading.
    plan, store = road.plan, kernel_store(road.plan, cache)
    backend, fallback = choose_backend(
        plan.backend, plan.strict, report, store, plan.batch_invariant
    )
    with interrupts:
        opened = road.bound(build(road, cache, backend), cache)
    opened.fallbacks.update(backend.notes + Counter([fallback] if fallback else []))
    return opened


def beginning(road: Road[T], cache: StepCache | None) -> Road[T]:
    """A copy for the steps with which a program can begin; the others become its `rest`.

    A program begins with the prefill step, and with the decode steps of every K of which the
    cache has all. If it has all of none, that is the smallest K, or 0 where K is one number;
    and of its decode steps, those that the cache has, and the largest, which serves any batch.
    The road itself is returned if nothing can be built in the background.
    """
    if cache is None or road.plan.frozen or not isinstance(road.source, Checkpoint):
        return road
    if road.wanted.form != "fused":
        return road
    is_one = len(road.tiers) == 1 and road.tiers != (0,)
    plan = road.plan.given(begins_plain=True) if is_one else road.plan
    graphs, most = graph_keys(plan, "fused"), max(plan.batch_buckets)
    decode = [graph for graph in graphs if graph[0].phase == "decode"]
    kept = [graph for graph in decode if cache.find(*graph)]
    lacking = {key.spec_tokens for key, part in decode if (key, part) not in kept}
    begin = set(plan.tiers) - lacking or {min(plan.tiers)}

    def begins(graph: tuple[StepKey, Part]) -> bool:
        is_ready = graph in kept or graph[0].bucket.num_reqs == most
        return graph not in decode or (graph[0].spec_tokens in begin and is_ready)

    first = tuple(filter(begins, graphs))
    later = [graph for graph in graphs if graph not in first]
    rest = tuple(sorted(later, key=lambda graph: graph[0].spec_tokens))
    return replace(road, plan=plan, graphs=first, rest=rest)


def built_in_child(road: Road[T], cache: StepCache | None) -> Prepared | None:
    """Build what the cache lacks in another process; None if the checkpoint is small."""
    if cache is None or not isinstance(road.source, Checkpoint) or road.source.nbytes < LARGE:
        return None
    from mtpc.program.child_process import ChildJob, build_in_child  # Small ones are built here.
    from mtpc.weights.early_pages import EarlyPages

    directory, owns = road.source.directory.absolute(), road.wanted.owns_buffers
    ranks = None if road.ranks is None else road.ranks.place
    free, nbytes = free_bytes(), road.source.nbytes
    # The peak stays what it was: the largest tensor is mapped while the others have their memory.
    early = nbytes - max(stored.nbytes for stored in road.source.stored.values())
    if free is None or free < 3 * nbytes + 2 * WORKER:
        early = 0  # Builders and the page cache need it more.
    pages = EarlyPages(early)
    job = ChildJob(directory, road.plan, road.graphs, owns, ranks=ranks, early=early)
    is_built = build_in_child(job, cache, road.listener, pages.taking())
    return road.look_up(cache, pages) if is_built else None


def build(road: Road[T], cache: StepCache | None, backend: Backend) -> Prepared:
    """Trace and build what the cache lacks."""
    # Imported here: where a child builds, this process needs neither transformers nor export.
    from mtpc.program.build import FromHeaders, Job, build_here
    from mtpc.program.memory_plan import check_model

    listener, owns = road.listener, road.wanted.owns_buffers
    keeps = cache if cache is not None and backend.makes_files else OwnSteps(road.plan)
    job = Job(road.source, road.plan, keeps, road.ranks)
    if backend.makes_files and isinstance(road.source, Checkpoint):
        from_headers = FromHeaders(backend, partial(check_model, owns_buffers=owns))
        with without_collections():
            steps, _ = build_here(job, road.graphs, from_headers, listener)
        if not any(step.record.unexplained for step in steps.values()):
            return road.of_files(from_files(road.source, steps))
    loaded = _load(road, backend)
    make = partial(_compiler, road, loaded, backend)
    steps, compiler = build_here(job, road.graphs, make, listener)
    own = compiler.shared if owns and not backend.makes_files else None
    of_backend = (scheduled(compiler), backend.name, backend.device)
    return Prepared(compiler.built(steps, own), loaded.served(), *of_backend, loaded)


def _load(road: Road[T], backend: Backend) -> LoadedModel:
    from mtpc.models.load import load_planned
    from mtpc.models.place import place

    plan, ranks = road.plan, road.ranks
    if ranks is not None and isinstance(road.source, Checkpoint):
        loaded = load_planned(road.source, plan, headers_only=True)
        from mtpc.ranks.share import read_part  # Not above: few starts have ranks.

        part = read_part(loaded.with_layers(plan.layer_drafts), ranks, backend.device)
        if part is not None:
            return part
        backend.notes["weights that only transformers can read: all are on every rank"] += 1
    return place(load_planned(road.source, plan), backend.device)


def _compiler(
    road: Road[T], loaded: LoadedModel, backend: Backend, job: Job, begins: Begins
) -> StepCompiler:
    """The compiler of a loaded model, whose pages fit the device."""
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.memory_plan import planned_compiler

    plan, owns = road.plan.of_model(loaded.max_positions), road.wanted.owns_buffers
    # Tapes are bound to buffers later, as in a warm start: these are stand-ins.
    is_bound = owns and not backend.makes_files
    new_buffer = Layout.allocate if is_bound else Layout.reserve

    def make(plan: Plan) -> StepCompiler:
        of_job = (begins, new_buffer, road.ranks, job.cache)
        return StepCompiler(loaded, plan, backend, *of_job)

    if not owns:
        return make(plan)
    return planned_compiler(make, plan, backend, road.report, road.ranks)


def scheduled(compiler: StepCompiler) -> Plan:
    """The plan of a compiler that knows what a request keeps: `async_scheduling` follows from it.

    With it, decoding requests leave no snapshots, and `kv_offload_dir` gets no pages. Ranks have
    never run with it.
    """
    plan = compiler.plan
    count = snapshot_count(compiler.layout(compiler.keys[0]), plan)
    return plan.given(takes_snapshots=count > 0)


class HeldInterrupts:
    """Within its block SIGINT has no effect before the next call of `tell`, or the block's end.

    torch traces under thread-local modes, and enters them in several steps. A KeyboardInterrupt
    between two of these leaves a mode on, and then the next trace fails or ends the process.

    It does nothing outside of the main thread, which alone receives signals, and where SIGINT has
    no handler in Python.

    Args:
        listener: called with progress.
    """

    def __init__(self, listener: Listener):
        self._listener = listener
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._since_s: float | None = None

    def tell(self, progress: Progress) -> None:
        """Call the listener; then raise what was held."""
        self._listener(progress)
        self._release()

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._release()
            self._before = None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        elif now - self._since_s > IMPATIENT_S and self._before is not None:
            self._before(number, frame)

    def _release(self) -> None:
        if self._since_s is not None and self._before is not None:
            self._since_s = None
            self._before(signal.SIGINT, None)
