"""One road from a model and its options to steps that run.

source -> plan -> look up, or build what is missing -> bind to weights and buffers

`mtpc.compile` binds the steps as a program, `mtpc.compile_host` to a host's tensors; everything
before is the same for both. `mtpc.program.build_road` builds, where the cache lacks a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtpc.backends import PACKAGING, first_choice
from mtpc.backends.package import DEVICE
from mtpc.config import CompileOptions, warn_of_cost
from mtpc.environment import free_bytes, give_back
from mtpc.errors import CacheError, MtpcError
from mtpc.layout import Form, Graphs, graph_keys
from mtpc.layout.progress import Listener, Report, line_reporter
from mtpc.plan import Plan
from mtpc.program.open_cache import (
    checkpoint_fields,
    open_cache,
    plan_model,
    restore,
    sample_digest,
)
from mtpc.program.program import BuiltSteps, need_of_steps
from mtpc.program.step_cache import StepCache
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import SharedPages
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.models.load import LoadedModel
    from mtpc.program.child_process import Rest
    from mtpc.program.step_record import StepRecord
    from mtpc.ranks.group import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted(Generic[T]):
    """What a caller wants of a model.

    Attributes:
        form: which graphs each step has.
        owns_buffers: whether the result has state, caches and batch buffers of its own. If not,
            steps are traced over stand-ins, and nothing is written to them.
        bind: makes the result of a model.
        reads_text: whether the tokenizer is needed. It is loaded before the weights are there, as
            it takes twice the memory then that it keeps.
    """

    form: Form
    owns_buffers: bool
    bind: Callable[[Prepared], T]
    reads_text: bool = False


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
    from mtpc.ranks.exchanges import share_memory
    from mtpc.ranks.group import join_ranks

    row = first_choice(asked.backend)
    ranks = join_ranks(asked.tensor_parallel_size, on_gpus=bool(row and row.is_gpu))
    road = ranks.all_succeed(lambda: prepare(ranks))
    ranks.compare(_facts(road.source, road.plan))
    opened = ranks.all_succeed(road.open)
    fault = share_memory(ranks) if row and row.makes_files else ranks.apart
    opened.fallbacks.update([fault] if fault else [])
    return opened


def _facts(source: Any, plan: Plan) -> dict[str, str]:
    """What ranks must agree on of a model and its options."""
    facts = {"options": repr(plan.asked.settled())}
    if isinstance(source, Checkpoint):
        facts |= checkpoint_fields(source) | {"model.values": sample_digest(source)}
    return facts


def _road(
    model: Any,
    asked: CompileOptions,
    wanted: Wanted[T],
    progress: Listener,
    ranks: Ranks | None = None,
) -> Road[T]:
    """Open the checkpoint and make the plan; no step is looked for yet."""
    report = line_reporter(progress)
    source, plan = plan_model(model, asked, must_draft=not wanted.owns_buffers)
    if isinstance(source, Checkpoint) and source.replaces_mtp:
        report(f"{source.mtp_directory} drafts in place of the target's own MTP layers")
    if ranks is None or ranks.rank == 0:
        warn_of_cost(plan.quantize)
    graphs = tuple(graph_keys(plan, wanted.form))
    return Road(source, plan, wanted, report, progress, graphs, plan.tiers, ranks=ranks)


@dataclass(frozen=True)
class Road(Generic[T]):
    """The road of one model: what is known before any step is looked for.

    Attributes:
        source: the opened checkpoint, or a model object.
        plan: of the steps.
        wanted: what to make of them.
        report: called with a line on what takes long.
        listener: called at each stage.
        graphs: the steps to begin with, and `rest` those that are built in the background.
        tiers: the numbers of drafts to choose from in the end.
        ranks: the processes that share the model; None: this one has all of it.
    """

    source: Any
    plan: Plan
    wanted: Wanted[T]
    report: Report
    listener: Listener
    graphs: Graphs
    tiers: tuple[int, ...]
    rest: Graphs = ()
    ranks: Ranks | None = None

    def open(self) -> Opened[T]:
        """Look up, build and bind; with several ranks, this rank's part of each step."""
        cache = open_cache(self.source, self.plan, self.report, self.ranks)
        model = self.look_up(cache)
        if model is not None:
            return self.bound(model, cache)
        from mtpc.program.build_road import open_built  # Not above: a warm start builds nothing.

        return open_built(self, cache)

    def look_up(self, cache: StepCache | None, pages: SharedPages | None = None) -> Prepared | None:
        """All steps from the cache, or None if one is missing; transformers is not imported. Their
        weights are made in `pages`, where these are given."""
        if cache is None or not isinstance(self.source, Checkpoint):
            return None
        found = restore(self.source, cache, self.graphs, self._caches_of_ranks(), pages)
        return None if found is None else self.of_files(found)

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

    def of_files(self, built: BuiltSteps) -> Prepared:
        """Steps whose weights come straight from the checkpoint's files."""
        step, directory = next(iter(built.steps.values())), self.source.directory
        ends = self.source.stop_ids()
        served = ServedModel(str(directory), step.record.vocab_size, ends, directory)
        return Prepared(built, served, step.plan, PACKAGING, DEVICE)

    def bound(self, found: Prepared, cache: StepCache | None) -> Opened[T]:
        """Make of the steps what is wanted, and check the weights that this reads."""
        served = found.served
        if cache is not None:
            served = replace(served, kept=KeptTokenizers(cache.store, self.plan.frozen))
            is_first = self.ranks is None or self.ranks.rank == 0  # Others see no text.
            if is_first and self.wanted.reads_text and served.load_kept():
                give_back()
        model = replace(found, cache=cache, identity=self._identity(found), served=served)
        built, source, rest = model.built, self.source, None
        if model.loaded is not None:
            made = self.wanted.bind(model)
        else:
            need = need_of_steps(built.steps, model.plan, self.wanted.owns_buffers)
            need.check(model.plan, free_bytes(), built.early)
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
        from mtpc.program.identity import page_identity  # Not above: few starts offload.

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
