"""From a model to a `HostedModel`: out of the graph cache, or traced, cut and lowered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from mtpc.api import print_progress
from mtpc.backends import Backend, choose_backend
from mtpc.capture.graph import WeightTable, set_tensor
from mtpc.config import CompileOptions
from mtpc.errors import OptionError
from mtpc.host.hosted import Form, HostedModel, parts_of
from mtpc.host.parts import CachedPart, GraphPart, Lowered, PackagePart
from mtpc.layout import Layout, Part, StepKey, largest_first, step_keys
from mtpc.layout.progress import Listener, line_reporter
from mtpc.program.opening import kernel_store, open_cache
from mtpc.program.restore import open_weights
from mtpc.program.step_cache import CachedStep, StepCache
from mtpc.weights.checkpoint import Checkpoint, stored_dtype

if TYPE_CHECKING:
    from mtpc.capture.graph import StepGraph
    from mtpc.program.compiler import StepCompiler

Parts = dict[tuple[StepKey, Part], Lowered]
_ENGINE_OPTIONS = ("busy_prefill_chunk", "prefix_caching", "async_scheduling", "require_sha256")
"""Options that say what the engine, or the cache of its programs, does."""


def compile_host(
    model: Any, form: Form = "split", progress: Listener = print_progress, **options: Any
) -> HostedModel:
    """Compile a model into `verify` and `propose` programs over buffers that the caller owns.

    Nothing is allocated: what is compiled is bound to the caller's tensors by `HostedModel.bind`.
    docs/embedding.md is the contract. Packages of the cpu backend go through the graph cache;
    `mtpc build --split` builds them ahead.

    Args:
        model: as for `mtpc.compile`.
        form: "split" (verify and propose), "fused" (one graph a step), or "both".
        progress: called with a `mtpc.Progress` at each stage.
        **options: fields of `mtpc.CompileOptions`, but for those that are the engine's.

    Raises:
        OptionError: an option is unknown, out of range, or the engine's.
        MtpcError: as `mtpc.compile`.
    """
    if form not in get_args(Form):
        raise OptionError(f"form is {form!r}; expected one of {', '.join(get_args(Form))}")
    for name in _ENGINE_OPTIONS:
        if name in options:
            raise OptionError(f"{name} belongs to mtpc.compile; a host that schedules has no such")
    parsed, report = CompileOptions.parse(options), line_reporter(progress)
    source = Checkpoint(Path(model)) if isinstance(model, (str, Path)) else model
    parsed = parsed.for_weights(stored_dtype(source))
    cache = open_cache(source, parsed, report)
    hosted = None
    if cache is not None and isinstance(source, Checkpoint):
        hosted = _restore(source, parsed, cache, form)
    if hosted is None:
        hosted = _Compilation(source, parsed, form, progress, report).run(cache)
    if cache is not None:
        hosted.fallbacks.update(cache.notes)
    return hosted


def _wanted(options: CompileOptions, form: Form) -> list[tuple[StepKey, Part]]:
    """Every graph, those of large steps first: a device's memory pool then holds the small."""
    keys = largest_first(step_keys(options))
    return [(key, part) for key in keys for part in parts_of(key, form)]


def _restore(
    source: Checkpoint, options: CompileOptions, cache: StepCache, form: Form
) -> HostedModel | None:
    """All of it from the cache, without transformers, if the cache has all of it."""
    wanted, found = _wanted(options, form), dict[tuple[StepKey, Part], CachedStep]()
    for part in dict.fromkeys(part for _, part in wanted):
        steps = cache.find_all([key for key, of in wanted if of == part], part)
        if steps is None:
            return None
        found.update({(key, part): step for key, step in steps.items()})
    records = [step.record for step in found.values()]
    opened = open_weights(source, cache, records)
    if opened is None:
        return None
    weights = WeightTable({})
    parts: Parts = {key: CachedPart(found[key], weights, opened.source) for key in wanted}
    served, settled, notes = opened.served(), opened.settled(options), Counter(source.notes)
    return HostedModel(served, settled, form, "cpu", notes, parts, opened.check, cache)


class _Compilation:
    """What is at hand while a model is compiled.

    Args:
        source: a `Checkpoint` or a transformers model.
        options: as asked for.
        form: which graphs.
        progress: hears of each stage.
        report: hears of what is not a stage.
    """

    def __init__(
        self,
        source: Any,
        options: CompileOptions,
        form: Form,
        progress: Listener,
        report: Callable[[str], None],
    ):
        self.source, self.options, self.form = source, options, form
        self.progress, self.report = progress, report

    def run(self, cache: StepCache | None) -> HostedModel:
        """Trace and lower what the cache lacks."""
        # Imported here: a warm start needs none of transformers, export and Inductor.
        from mtpc.backends.cpu import CpuBackend
        from mtpc.models.load import load, place
        from mtpc.program.compiler import StepCompiler

        options, store = self.options, kernel_store(self.options, cache)
        backend, fallback = choose_backend(options.backend, options.strict, self.report, store)
        loaded = place(
            load(self.source, options.dtype, needs_mtp=options.spec_tokens > 0), backend.device
        )
        notes = Counter(loaded.checkpoint.notes if loaded.checkpoint else ())
        notes.update([fallback] if fallback else [])
        # The host's tensors come later: these stand for them, and are never written.
        compiler = StepCompiler(loaded, options, backend, self.progress, Layout.reserve)
        parts: Parts | None
        if cache is not None and isinstance(backend, CpuBackend):
            parts = self._through_cache(compiler, backend, cache)
            if parts is None:  # As any later start does it, without the plain weights in memory.
                del loaded, compiler
                restored = _restore(self.source, options, cache, self.form)
                return restored or self.run(None)
        else:
            parts = dict(self._without_cache(compiler, backend))
        notes.update(backend.notes)
        compiler.tell("done", None)
        served, settled, device = loaded.served(), compiler.options, backend.device
        return HostedModel(served, settled, self.form, device, notes, parts, lambda: None, cache)

    def _through_cache(
        self, compiler: StepCompiler, backend: Any, cache: StepCache
    ) -> Parts | None:
        """Parts from the cache; None where a start from there needs no model in memory."""
        from mtpc.program.caching_compiler import CachingCompiler

        caching = CachingCompiler(compiler, backend, cache)
        parts: Parts = {
            (key, part): CachedPart(caching.obtain(key, part), compiler.weights)
            for key, part in _wanted(self.options, self.form)
        }
        return None if caching.is_restorable and isinstance(self.source, Checkpoint) else parts

    def _without_cache(
        self, compiler: StepCompiler, backend: Backend
    ) -> Iterator[tuple[tuple[StepKey, Part], Lowered]]:
        from mtpc.capture.split import split_step

        graphs: dict[Part, StepGraph] = {}
        for key, part in _wanted(self.options, self.form):
            if part == parts_of(key, self.form)[0]:
                graph = compiler.rewritten(key)
                graphs = {"step": graph}
                if self.form != "fused" and key.spec_tokens:
                    split = split_step(graph)
                    graphs |= {"verify": split.verify, "propose": split.propose}
            yield (key, part), _lowered(graphs[part], backend)


def _lowered(graph: StepGraph, backend: Backend) -> Lowered:
    """A package where the backend makes one, which is opened over any tensors; else the graph."""
    from mtpc.backends.cpu import CpuBackend

    if not isinstance(backend, CpuBackend):
        for name, tensor in graph.buffers().items():  # No memory is held for what will be bound.
            set_tensor(graph.module, name, tensor.to("meta"), buffer=True)
        return GraphPart(graph, backend)
    directory = TemporaryDirectory(prefix="mtpc-host-")
    package = backend.package(graph, Path(directory.name))
    return PackagePart(graph.layout, directory, package, graph.weights)
