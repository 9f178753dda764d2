"""One road from a model and its options to steps that run.

source -> plan -> look up, or build what is missing -> bind to weights and buffers

`mtpc.compile` binds the steps as a program, `mtpc.compile_host` to a host's tensors; everything
before is the same for both. Steps are built without weights, from a checkpoint's headers, and bound
to its files. Only where that is not possible, they are built from a loaded model: a model object,
weights that transformers alone can read, and backends whose artifacts are no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtpc.backends import PACKAGING, choose_backend, first_choice
from mtpc.backends.package import DEVICE
from mtpc.config import CompileOptions, warn_of_cost
from mtpc.errors import CacheError, MtpcError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys
from mtpc.layout.progress import Listener, Report, line_reporter
from mtpc.plan import Plan
from mtpc.program.open_cache import (
    from_files,
    kernel_store,
    open_cache,
    page_identity,
    plan_model,
    restore,
)
from mtpc.program.processes import HeldInterrupts, free_bytes, without_collections
from mtpc.program.program import BuiltSteps, need_of_steps
from mtpc.program.step_cache import OwnSteps, StepCache
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.paired_checkpoint import PairedCheckpoint
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.models.load import LoadedModel
    from mtpc.program.build import Job
    from mtpc.program.child_process import Rest
    from mtpc.program.compiler import Begins, StepCompiler
    from mtpc.program.ranks import Ranks
    from mtpc.program.step_record import StepRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted(Generic[T]):
    """What a caller wants of a model.

    Attributes:
        form: which graphs each step has.
        owns_buffers: whether the result has state, caches and batch buffers of its own. If not,
            steps are traced over stand-ins, and nothing is written to them.
        bind: makes the result of a model.
    """

    form: Form
    owns_buffers: bool
    bind: Callable[[Prepared], T]


@dataclass(frozen=True)
class Prepared:
    """Steps that are built, and what is known of their model.

    Attributes:
        built: the steps.
        served: vocabulary, end-of-sequence ids, tokenizer.
        plan: what the steps were built by.
        backend: name of the backend that runs them.
        device: where they run, as torch names it.
        loaded: the model in memory; None where its weights come from files.
        cache: the steps' entries; None if no cache keeps them.
        identity: see `page_identity`; "" without the option `kv_offload_dir`.
    """

    built: BuiltSteps
    served: ServedModel
    plan: Plan
    backend: str
    device: str
    loaded: LoadedModel | None = None
    cache: StepCache | None = None
    identity: str = ""


@dataclass(frozen=True)
class Opened(Generic[T]):
    """A model whose steps are ready.

    Attributes:
        made: what the caller has bound.
        model: what it was made of.
        fallbacks: what runs differently from what was asked for, counted, with reasons.
        rest: the steps that are still to be built, with `build_in_background`; None if all are
            there.
        ranks: the processes that share the model; None: this one has all of it.
    """

    made: T
    model: Prepared
    fallbacks: Counter[str]
    rest: Rest | None
    ranks: Ranks | None


def open_steps(
    model: Any, asked: CompileOptions, wanted: Wanted[T], progress: Listener
) -> Opened[T]:
    """Take every step from the graph cache, or build what the cache lacks; then bind them.

    Args:
        model: a checkpoint directory (str or Path), an id of the hub (ORG/NAME), or a transformers
            model loaded from one.
        asked: its options.
        wanted: what to make of it.
        progress: called at each stage.

    Raises:
        MtpcError: as `mtpc.compile`; the weights are checked.
    """
    prepare = partial(_road, model, asked, wanted, progress)
    if asked.tensor_parallel_size == 1:
        return prepare().open()
    from mtpc.program.rank_exchanges import share_memory
    from mtpc.program.ranks import join_ranks

    row = first_choice(asked.backend)
    ranks = join_ranks(asked.tensor_parallel_size, on_gpus=bool(row and row.is_gpu))
    road = ranks.all_succeed(lambda: prepare(ranks))
    ranks.compare(road.source, road.plan)
    opened = ranks.all_succeed(road.open)
    fault = share_memory(ranks) if row and row.makes_files else ranks.apart
    opened.fallbacks.update([fault] if fault else [])
    return opened


def _road(
    model: Any,
    asked: CompileOptions,
    wanted: Wanted[T],
    progress: Listener,
    ranks: Ranks | None = None,
) -> _Road[T]:
    """Open the checkpoint and make the plan; no step is looked for yet."""
    interrupts = HeldInterrupts(progress)
    report = line_reporter(interrupts.tell)
    source, plan = plan_model(model, asked, must_draft=not wanted.owns_buffers)
    if isinstance(source, PairedCheckpoint) and source.replaces_mtp:
        report(f"{source.draft.directory} drafts in place of the target's own MTP layers")
    if ranks is None or ranks.rank == 0:
        warn_of_cost(plan.quantize)
    graphs = tuple(graph_keys(plan, wanted.form))
    return _Road(source, plan, wanted, report, interrupts, graphs, plan.tiers, ranks=ranks)


@dataclass(frozen=True)
class _Road(Generic[T]):
    """The road of one model: what is known before any step is looked for."""

    source: Any
    plan: Plan
    wanted: Wanted[T]
    report: Report
    interrupts: HeldInterrupts
    graphs: Graphs
    tiers: tuple[int, ...]
    rest: Graphs = ()
    ranks: Ranks | None = None

    def open(self) -> Opened[T]:
        """Look up, build and bind; with several ranks, this rank's part of each step."""
        cache = open_cache(self.source, self.plan, self.report, self.ranks)
        road, model = self, self.look_up(cache)
        if model is None and self.plan.build_in_background:
            road = self.beginning(cache)
            model = road.look_up(cache)
        model = model or road.built_in_child(cache)
        if model is not None:
            return road.bound(model, cache)
        # The backend comes first: a missing GPU must be reported before minutes of loading.
        plan, store = self.plan, kernel_store(self.plan, cache)
        backend, fallback = choose_backend(
            plan.backend, plan.strict, self.report, store, plan.batch_invariant
        )
        with self.interrupts:
            opened = road.bound(road.build(cache, backend), cache)
        opened.fallbacks.update(backend.notes + Counter([fallback] if fallback else []))
        return opened

    def look_up(self, cache: StepCache | None) -> Prepared | None:
        """All steps from the cache, or None if one is missing; transformers is not imported."""
        if cache is None or not isinstance(self.source, Checkpoint):
            return None
        found = restore(self.source, cache, self.graphs, self._caches_of_ranks())
        return None if found is None else self._of_files(found)

    def _caches_of_ranks(self) -> tuple[StepCache | None, ...]:
        """The caches of all ranks, None for this one; only `require_sha256` needs the others."""
        if self.ranks is None or not self.plan.require_sha256:
            return (None,)
        place = self.ranks.place
        return tuple(
            None
            if rank == place.rank
            else open_cache(self.source, self.plan, self.report, replace(place, rank=rank))
            for rank in range(place.size)
        )

    def _of_files(self, built: BuiltSteps) -> Prepared:
        """Steps whose weights come straight from the checkpoint's files."""
        step, directory = next(iter(built.steps.values())), self.source.directory
        ends = self.source.stop_ids()
        served = ServedModel(str(directory), step.record.vocab_size, ends, directory)
        return Prepared(built, served, step.plan, PACKAGING, DEVICE)

    def beginning(self, cache: StepCache | None) -> _Road[T]:
        """A copy for the steps with which a program can begin; the others become its `rest`.

        A program begins with the prefill step, and with the decode steps of every K of which the
        cache has all. If it has all of none, that is the smallest K, or 0 where K is one number;
        and of its decode steps, those that the cache has, and the largest, which serves any batch.
        The road itself is returned if nothing can be built in the background.
        """
        if cache is None or self.plan.frozen or not isinstance(self.source, Checkpoint):
            return self
        if self.wanted.form != "fused":
            return self
        is_one = len(self.tiers) == 1 and self.tiers != (0,)
        plan = self.plan.given(begins_plain=True) if is_one else self.plan
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
        return replace(self, plan=plan, graphs=first, rest=rest)

    def built_in_child(self, cache: StepCache | None) -> Prepared | None:
        """Build what the cache lacks in another process; None if the checkpoint is small."""
        if cache is None or not isinstance(self.source, Checkpoint):
            return None
        from mtpc.program.child_process import build_in_child

        listener, owns, rank = self.interrupts.tell, self.wanted.owns_buffers, self.ranks
        to_build = (self.source, self.plan, self.graphs, cache)
        is_built = build_in_child(*to_build, listener, owns, rank and rank.place)
        return self.look_up(cache) if is_built else None

    def build(self, cache: StepCache | None, backend: Backend) -> Prepared:
        """Trace and build what the cache lacks."""
        # Imported here: a warm start needs neither transformers nor export.
        from mtpc.program.build import FromHeaders, Job, build_here
        from mtpc.program.memory_plan import check_model

        listener, owns = self.interrupts.tell, self.wanted.owns_buffers
        keeps = cache if cache is not None and backend.makes_files else OwnSteps(self.plan)
        job = Job(self.source, self.plan, keeps, self.ranks)
        if backend.makes_files and isinstance(self.source, Checkpoint):
            from_headers = FromHeaders(backend, partial(check_model, owns_buffers=owns))
            with without_collections():
                steps, _ = build_here(job, self.graphs, from_headers, listener)
            if not any(step.record.unexplained for step in steps.values()):
                return self._of_files(from_files(self.source, steps))
        loaded = self._load(backend)
        make = partial(self._compiler, loaded, backend)
        steps, compiler = build_here(job, self.graphs, make, listener)
        own = compiler.shared if owns and not backend.makes_files else None
        of_backend = (scheduled(compiler), backend.name, backend.device)
        return Prepared(compiler.built(steps, own), loaded.served(), *of_backend, loaded)

    def _load(self, backend: Backend) -> LoadedModel:
        from mtpc.models.load import load_planned
        from mtpc.models.place import place
        from mtpc.program.rank_share import read_part

        plan, ranks = self.plan, self.ranks
        if ranks is not None and isinstance(self.source, Checkpoint):
            loaded = load_planned(self.source, plan, headers_only=True)
            part = read_part(loaded.with_layers(plan.layer_drafts), ranks, backend.device)
            if part is not None:
                return part
            backend.notes["weights that only transformers can read: all are on every rank"] += 1
        return place(load_planned(self.source, plan), backend.device)

    def _compiler(
        self, loaded: LoadedModel, backend: Backend, job: Job, begins: Begins
    ) -> StepCompiler:
        """The compiler of a loaded model, whose pages fit the device."""
        from mtpc.program.compiler import StepCompiler
        from mtpc.program.memory_plan import planned_compiler

        plan, owns = self.plan.of_model(loaded.max_positions), self.wanted.owns_buffers
        # Tapes are bound to buffers later, as in a warm start: these are stand-ins.
        is_bound = owns and not backend.makes_files
        new_buffer = Layout.allocate if is_bound else Layout.reserve

        def make(plan: Plan) -> StepCompiler:
            of_job = (begins, new_buffer, self.ranks, job.cache)
            return StepCompiler(loaded, plan, backend, *of_job)

        if not owns:
            return make(plan)
        return planned_compiler(make, plan, backend, self.report, self.ranks)

    def bound(self, found: Prepared, cache: StepCache | None) -> Opened[T]:
        """Make of the steps what is wanted, and check the weights that this reads."""
        served = found.served
        if cache is not None:
            served = replace(served, kept=KeptTokenizers(cache.store, self.plan.frozen))
        model = replace(found, cache=cache, identity=self._identity(found), served=served)
        built, source, rest = model.built, self.source, None
        if model.loaded is not None:
            made = self.wanted.bind(model)
        else:
            need = need_of_steps(built.steps, model.plan, self.wanted.owns_buffers)
            need.check(model.plan, free_bytes())
            made = self._bound_to_files(model)
        built.weights.check()
        if self.rest and cache is not None:
            from mtpc.program.child_process import Rest

            rest = Rest(built, source, cache, self.plan, self.rest, self.tiers)
        checkpoint = model.loaded.checkpoint if model.loaded is not None else source
        fallbacks = Counter(self.plan.notes)
        for notes in (cache.notes if cache else (), checkpoint.notes if checkpoint else ()):
            fallbacks.update(notes)
        records = [step.record for step in built.steps.values()]
        fallbacks.update(filter(None, (record.fallback for record in records)))
        fallbacks.update(_untrimmed(records) if self.plan.draft_vocab else ())
        return Opened(made, model, fallbacks, rest, self.ranks)

    def _bound_to_files(self, model: Prepared) -> T:
        try:
            return self.wanted.bind(model)
        except MtpcError:
            raise
        except Exception as error:
            if model.cache is None:
                raise
            raise CacheError(
                f"steps of the graph cache {model.cache.store.root} do not fit "
                f"{model.served.name}: {type(error).__name__}: {error}; remove them: "
                "mtpc cache prune --all"
            ) from error

    def _identity(self, model: Prepared) -> str:
        if not model.plan.kv_offload_dir:
            return ""
        self.report("read the weights, to know their pages in kv_offload_dir")
        return page_identity(self.source, model.plan, model.backend)


def _untrimmed(records: Iterable[StepRecord]) -> list[str]:
    """A line for `Stats.fallbacks` if all drafts are from the whole vocabulary."""
    from mtpc.passes.trim_draft_head import TrimDraftHead  # Not above: few starts import a pass.

    drafting = (record for record in records if record.step.spec_tokens)
    passed = (each for record in drafting for each in record.history)
    trimmed = [each.rewrites for each in passed if each.name == TrimDraftHead.name]
    if not trimmed or any(trimmed):
        return []
    return ["draft_vocab has no effect: the head of this drafter is more than one product"]


def scheduled(compiler: StepCompiler) -> Plan:
    """The plan of a compiler that knows what a request keeps: `async_scheduling` follows from it.

    With it, decoding requests leave no snapshots, and `kv_offload_dir` gets no pages. Ranks have
    never run with it.
    """
    from mtpc.layout.slot_state import snapshot_count

    plan = compiler.plan
    count = snapshot_count(compiler.layout(compiler.keys[0]), plan)
    return plan.given(takes_snapshots=count > 0)
