"""One way from a model and its options to steps that run: from the graph cache, or compiled.

`mtpc.compile` assembles the steps into a program, `mtpc.compile_host` into parts that are bound to
a host's tensors. An `Assembler` says how; everything else is the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtpc.backends import PACKAGING, choose_backend, first_choice, settle_prefill
from mtpc.backends.cpu_kernels import fill_packed
from mtpc.backends.package import DEVICE
from mtpc.capture.graph import WeightTable
from mtpc.config import ALIASES, CompileOptions
from mtpc.errors import CacheError, CheckpointError, MtpcError, OptionError
from mtpc.layout import Form, Graphs, Layout, Part, StepKey, graph_keys
from mtpc.layout.display import log
from mtpc.layout.progress import Listener, Report, line_reporter
from mtpc.program.background import Rest
from mtpc.program.binding import WeightSource
from mtpc.program.child_process import build_in_child
from mtpc.program.free_memory import free_bytes
from mtpc.program.host_memory import check_model, need_of_steps
from mtpc.program.interrupts import HeldInterrupts
from mtpc.program.open_cache import kernel_store, open_cache
from mtpc.program.page_identity import page_identity
from mtpc.program.processes import without_collections
from mtpc.program.restore import Restored, Steps, restore
from mtpc.program.step_cache import StepCache
from mtpc.weights.checkpoint import Checkpoint, stored_dtype
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.paired_checkpoint import PairedCheckpoint, checkpoint_of, open_checkpoint
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.models.load import LoadedModel
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Assembler(Generic[T]):
    """Makes what its caller runs from compiled steps.

    Attributes:
        form: which graphs each step has.
        owns_buffers: whether the result has state, caches and batch buffers of its own. If not,
            steps are traced over stand-ins, and nothing is written to them.
        assemble: makes the result from entries of the graph cache. Its arguments are the entries,
            largest first; the weights that exist, by name; and the source of the others, or None.
        compile: makes the result from steps that no cache keeps.
    """

    form: Form
    owns_buffers: bool
    assemble: Callable[[Steps, WeightTable, WeightSource | None], T]
    compile: Callable[[StepCompiler], T]


@dataclass(frozen=True)
class Opened(Generic[T]):
    """A model whose steps are ready.

    Attributes:
        made: the assembler's result.
        served: vocabulary, end-of-sequence ids, tokenizer.
        options: what the steps were compiled with, `max_len` settled.
        device: where the steps run, as torch names it.
        fallbacks: what runs differently from what was asked for, counted, with reasons.
        check: raises CheckpointError if weights that binding read are unusable.
        loaded: the model in memory; None where all of it came from the cache.
        cache: the steps' entries; it also holds the files of steps that the cache could not keep,
            until they are bound.
        rest: the steps that are still to be built, with `build_in_background`; None if all are
            there.
        identity: see `page_identity`; "" without the option `kv_offload_dir`.
        ranks: the processes that share the model; None: this one has all of it.
    """

    made: T
    served: ServedModel
    options: CompileOptions
    device: str
    fallbacks: Counter[str]
    check: Callable[[], None]
    loaded: LoadedModel | None = None
    cache: StepCache | None = None
    rest: Rest | None = None
    identity: str = ""
    ranks: Ranks | None = None


def open_steps(
    model: Any, options: dict[str, Any], assembler: Assembler[T], progress: Listener
) -> Opened[T]:
    """Take every step from the graph cache, or compile what the cache lacks.

    Args:
        model: a checkpoint directory (str or Path), an id of the local hub cache, or a transformers
            model loaded from one.
        options: fields of `CompileOptions`, or their aliases.
        assembler: makes the result of the steps.
        progress: called at each stage.

    Raises:
        MtpcError: as `mtpc.compile`; the weights are checked.
    """
    parsed = CompileOptions.parse(options)
    gives_k = "spec_tokens" in [ALIASES.get(name, name) for name in options]
    may_be_plain = assembler.owns_buffers and not gives_k
    prepare = partial(_prepare, model, parsed, may_be_plain, assembler, progress)
    if parsed.tensor_parallel_size == 1:
        return prepare().open()
    from mtpc.program.group_memory import share_memory
    from mtpc.program.ranks import join_ranks

    row = first_choice(parsed.backend)
    ranks = join_ranks(parsed.tensor_parallel_size, on_gpus=bool(row and row.is_gpu))
    opener = ranks.all_succeed(lambda: prepare(ranks))
    ranks.compare(opener.source, opener.options)
    opened = ranks.all_succeed(opener.open)
    fault = share_memory(ranks) if row and row.has_packages else ranks.apart
    opened.fallbacks.update([fault] if fault else [])
    return opened


def _prepare(
    model: Any,
    options: CompileOptions,
    may_be_plain: bool,
    assembler: Assembler[T],
    progress: Listener,
    ranks: Ranks | None = None,
) -> _Opener[T]:
    """Open the checkpoint and settle what follows from it; no step is looked for yet.

    `may_be_plain`: without anything that drafts, K is 0.
    """
    interrupts = HeldInterrupts(progress)
    report = line_reporter(interrupts.tell)
    source = model
    if isinstance(model, (str, Path)):
        source = open_checkpoint(Path(model), options.drafter)
        if isinstance(source, PairedCheckpoint) and source.replaces_mtp:
            report(f"{source.draft.directory} drafts in the place of the target's own MTP layers")
    elif options.kv_offload_dir is not None:
        raise OptionError(
            "kv_offload_dir with a model object, whose weights may change between runs; "
            "expected a checkpoint's directory"
        )
    notes = _without_drafts(source, options, may_be_plain)
    options = replace(options, spec_tokens=0) if notes else options
    settled = settle_prefill(_on_its_device(options, source), stored_dtype(source))
    graphs = tuple(graph_keys(settled, assembler.form))
    tiers = settled.tiers
    opener = _Opener(source, settled, assembler, report, interrupts, graphs, tiers, ranks=ranks)
    return replace(opener, notes=notes)


def _without_drafts(source: Any, options: CompileOptions, may_be_plain: bool) -> tuple[str, ...]:
    """A note if nothing drafts for this model, and it is to decode plainly; else ().

    Raises:
        CheckpointError: nothing drafts, and K is given or `strict` is set.
    """
    if options.spec_tokens == 0 or options.draft is not None:
        return ()
    why = _why_plain(source)
    if not why:
        return ()
    if not may_be_plain or options.strict:
        raise CheckpointError(f"{why}; or use spec_tokens=0 to decode without drafts")
    note = f"no drafts, K = 0: {why}"
    log.warning(note)
    return (note,)


def _why_plain(source: Any) -> str:
    """`CheckpointFiles.without_drafts` of a checkpoint, or of the one that a model object is of."""
    if not isinstance(source, Checkpoint) and getattr(source, "name_or_path", None) is None:
        return ""  # Not a model: loading says so.
    checkpoint = source if isinstance(source, Checkpoint) else checkpoint_of(source, False)
    if checkpoint is not None:
        return checkpoint.without_drafts
    config = source.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in MTP_COUNT_NAMES):
        return ""
    return "the model announces no MTP layers; for drafts, give a drafter's checkpoint (draft=DIR)"


def _on_its_device(options: CompileOptions, source: Any) -> CompileOptions:
    """Options for a model object that is on a GPU: "auto" is the backend of that device."""
    device = getattr(source, "device", None)
    if options.backend == "auto" and getattr(device, "type", None) == "cuda":
        return replace(options, backend="cuda")
    return options


@dataclass(frozen=True)
class _Opener(Generic[T]):
    """The ways to open one model."""

    source: Any
    options: CompileOptions
    assembler: Assembler[T]
    report: Report
    interrupts: HeldInterrupts
    graphs: tuple[tuple[StepKey, Part], ...]
    tiers: tuple[int, ...]
    rest: Graphs = ()
    ranks: Ranks | None = None
    notes: tuple[str, ...] = ()

    def open(self) -> Opened[T]:
        """From the cache, or compiled; with several ranks, this rank's part of each step."""
        opener, source = self, self.source
        cache = open_cache(source, self.options, self.report, self.ranks)
        opened = opener.restored(cache)
        if opened is None and self.options.build_in_background:
            opener = opener.beginning(cache)
            opened = opener.restored(cache)
        if opened is None and opener.build_in_child(cache):
            opened = opener.restored(cache)
        if opened is None:
            opened = opener.compiled(cache)
        opened.check()
        checkpoint = opened.loaded.checkpoint if opened.loaded else source
        opened.fallbacks.update(self.notes)
        for notes in (cache.notes if cache else (), checkpoint.notes if checkpoint else ()):
            opened.fallbacks.update(notes)
        return replace(opened, ranks=self.ranks)

    def beginning(self, cache: StepCache | None) -> _Opener[T]:
        """A copy for the steps with which a program can begin; the others become its `rest`.

        A program begins with the prefill step, and with the decode steps of every K that the cache
        has. If it has none, that is the smallest K, or 0 where K is one number. The opener itself
        is returned if nothing can be built in the background.
        """
        options = self.options
        tiers = options.tiers if len(options.tiers) > 1 else (0, *options.tiers)
        if cache is None or cache.frozen or not isinstance(self.source, Checkpoint):
            return self
        if options.spec_tokens == 0 or self.assembler.form != "fused":
            return self
        options = replace(options, spec_tiers=tiers)
        graphs = graph_keys(options, "fused")
        decode = [graph for graph in graphs if graph[0].phase == "decode"]
        lacking = {key.spec_tokens for key, part in decode if not cache.find(key, part)}
        begin = set(tiers) - lacking or {min(tiers)}
        first = [g for g in graphs if g[0].phase == "prefill" or g[0].spec_tokens in begin]
        later = [graph for graph in graphs if graph not in first]
        rest = tuple(sorted(later, key=lambda graph: graph[0].spec_tokens))
        return replace(self, options=options, graphs=tuple(first), rest=rest)

    def restored(self, cache: StepCache | None) -> Opened[T] | None:
        """All steps from the cache, or None if one is missing; transformers is not imported."""
        if cache is None or not isinstance(self.source, Checkpoint):
            return None
        found = restore(self.source, self.options, cache, self.graphs, self._caches_of_ranks())
        return None if found is None else self._bound(found, cache)

    def _caches_of_ranks(self) -> tuple[StepCache | None, ...]:
        """The caches of all ranks, None for this one; only `require_sha256` needs the others."""
        if self.ranks is None or self.options.require_sha256 is None:
            return (None,)
        return tuple(
            None
            if place.rank == self.ranks.rank
            else open_cache(self.source, self.options, self.report, place)
            for place in self.ranks.all_places
        )

    def _bound(self, found: Restored, cache: StepCache) -> Opened[T]:
        """Steps with weights straight from the checkpoint's files."""
        options = found.settled(self.options)
        need = need_of_steps(found.steps, options, self.assembler.owns_buffers)
        need.check(options, free_bytes())
        try:
            weights = WeightTable({})
            made = self.assembler.assemble(found.steps, weights, found.source)
        except MtpcError:
            raise
        except Exception as error:
            raise CacheError(
                f"steps of the graph cache {cache.store.root} do not fit "
                f"{found.checkpoint.directory}: {type(error).__name__}: {error}; remove them: "
                "mtpc cache prune --all"
            ) from error
        later = (found, weights, cache, self.options, self.rest, self.tiers)
        return Opened(
            made, found.served(), options, DEVICE, Counter(), found.source.check, None, cache,
            Rest(*later) if self.rest else None, self._identity(options, PACKAGING),
        )  # fmt: skip

    def _identity(self, options: CompileOptions, backend: str) -> str:
        """The identity of pages in files; "" without the option `kv_offload_dir`."""
        if options.kv_offload_dir is None:
            return ""
        self.report("read the weights, to know their pages in kv_offload_dir")
        return page_identity(self.source, options, backend)

    def build_in_child(self, cache: StepCache | None) -> bool:
        """Fill the cache in another process if the checkpoint is large; returns whether it did."""
        if cache is None or not isinstance(self.source, Checkpoint):
            return False
        listener, owns, rank = self.interrupts.tell, self.assembler.owns_buffers, self.ranks
        return build_in_child(
            self.source, self.options, self.graphs, cache, listener, owns, rank and rank.place
        )

    def compiled(self, cache: StepCache | None) -> Opened[T]:
        """Trace and lower what the cache lacks."""
        # The backend comes first: a missing GPU must be reported before minutes of loading.
        options, store = self.options, kernel_store(self.options, cache)
        backend, fallback = choose_backend(
            options.backend, options.strict, self.report, store, options.batch_invariant
        )
        with self.interrupts:
            opened = self._compiled(cache, backend)
        opened.fallbacks.update(backend.notes + Counter([fallback] if fallback else []))
        return opened

    def _compiled(self, cache: StepCache | None, backend: Backend) -> Opened[T]:
        # Imported here: a warm start needs neither transformers nor export.
        from mtpc.program.caching_compiler import CachingCompiler
        from mtpc.program.memory_plan import planned_compiler

        keeps = cache if backend.package is not None else None
        if keeps is not None and isinstance(self.source, Checkpoint):
            with without_collections():
                opened = self._built_from_headers(self.source, keeps, backend)
            if opened is not None:
                return opened
        loaded = self._load(backend)
        make = partial(self._compiler, loaded, backend, keeps)
        if self.assembler.owns_buffers:
            options = self.options.for_model(loaded.max_positions)
            compiler = planned_compiler(make, options, backend, self.report, self.ranks)
        else:
            compiler = make(self.options)
        if keeps is not None:
            steps = CachingCompiler(compiler, keeps).obtain_all(self.graphs)
            made = self.assembler.assemble(steps, compiler.weights, None)
        else:
            made = self.assembler.compile(compiler)
        compiler.tell("done", None)
        served, settled = loaded.served(), settle_scheduling(compiler, self.ranks)
        identity = self._identity(settled, backend.name)
        check = loaded.elsewhere.check if loaded.elsewhere else lambda: None
        return Opened(
            made, served, settled, backend.device, Counter(), check, loaded, cache, None, identity,
        )  # fmt: skip

    def _built_from_headers(
        self, source: Checkpoint, cache: StepCache, backend: Backend
    ) -> Opened[T] | None:
        """Steps that are built without weights, and bound to them as a warm start binds.

        None where only transformers can read some weight.
        """
        from mtpc.program.caching_compiler import CachingCompiler

        loaded = self._load(backend, headers_only=True)
        compiler = self._compiler(loaded, backend, cache, self.options)
        check_model(compiler, self.assembler.owns_buffers)
        steps = CachingCompiler(compiler, cache).obtain_all(self.graphs)
        if any(step.record.unexplained for step in steps.values()):
            return None
        return self._bound(Restored(source, steps, WeightSource(source, fill_packed)), cache)

    def _load(self, backend: Backend, headers_only: bool = False) -> LoadedModel:
        from mtpc.models.load import load
        from mtpc.models.place import place
        from mtpc.program.part_weights import read_part

        options, ranks = self.options, self.ranks
        given = (self.source, options.dtype, options.spec_tokens > 0, options.wiring)
        by_parts = ranks is not None and not headers_only and isinstance(self.source, Checkpoint)
        loaded = load(*given, headers_only or by_parts, draft=options.drafter)
        if ranks is not None and by_parts:
            part = read_part(loaded.with_layers(options.spec_tokens), ranks, backend.device)
            if part is not None:
                return part
            backend.notes["weights that only transformers can read: all are on every rank"] += 1
            loaded = load(*given, draft=options.drafter)
        return place(loaded, backend.device)

    def _compiler(
        self,
        loaded: LoadedModel,
        backend: Backend,
        cache: StepCache | None,
        options: CompileOptions,
    ) -> StepCompiler:
        from mtpc.program.compiler import StepCompiler

        # Cached steps are bound to buffers later, as in a warm start: these are stand-ins.
        own = self.assembler.owns_buffers and cache is None
        new_buffer = Layout.allocate if own else Layout.reserve
        listener = self.interrupts.tell
        return StepCompiler(loaded, options, backend, listener, new_buffer, self.ranks)


def settle_scheduling(compiler: StepCompiler, ranks: Ranks | None) -> CompileOptions:
    """The compiler's options with `async_scheduling`: by default on a GPU, where nothing is lost.

    With it, decoding requests leave no snapshots, and `kv_offload_dir` gets no pages. Ranks have
    never run with it.
    """
    from mtpc.layout.slot_state import snapshot_count

    options = compiler.options
    if options.async_scheduling is not None:
        return options
    keeps = snapshot_count(compiler.layout(compiler.keys[0]), options) > 0
    loses = keeps or options.kv_offload_dir is not None or ranks is not None
    is_gpu = compiler.backend.device.startswith("cuda")
    return replace(options, async_scheduling=is_gpu and not loses)
