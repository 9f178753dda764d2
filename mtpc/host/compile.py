"""From a model to a `HostedModel`: steps from the graph cache, or traced, cut and lowered."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack, get_args

from mtpc.arguments import CompileArguments
from mtpc.capture.graph import WeightTable, set_tensor
from mtpc.errors import OptionError
from mtpc.host.hosted import HostedModel
from mtpc.host.parts import CachedPart, GraphPart, Lowered, PackagePart, Parts
from mtpc.layout import Form, Part, graph_keys, parts_of
from mtpc.layout.display import show_compiling
from mtpc.layout.progress import Listener
from mtpc.program.binding import WeightSource
from mtpc.program.open_steps import Assembler, open_steps
from mtpc.program.step_cache import Steps

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.capture.graph import StepGraph
    from mtpc.program.compiler import StepCompiler

_ENGINE_OPTIONS = (
    *("busy_prefill_chunk", "prefix_caching", "snapshot_bytes", "snapshot_distance"),
    *("kv_offload_dir", "kv_offload_bytes"),
    *("async_scheduling", "require_sha256", "tensor_parallel_size", "images"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
)
"""Options of the engine and of its programs' cache, which a host lacks."""


def compile_host(
    model: Any,
    form: Form = "split",
    progress: Listener | None = None,
    **options: Unpack[CompileArguments],
) -> HostedModel:
    """Compile a model into `verify` and `propose` programs over buffers that the caller owns.

    Nothing is allocated: `HostedModel.bind` binds the compiled steps to the caller's tensors.
    docs/embedding.md is the contract. Packages of the cpu backend go through the graph cache;
    `mtpc build --split` builds them ahead.

    Args:
        model: as for `mtpc.compile`.
        form: "split" (verify and propose), "fused" (one graph a step), or "both".
        progress: see `mtpc.compile`.
        **options: fields of `mtpc.CompileOptions` but the engine's; `sampling` is off by default.

    Raises:
        OptionError: an option is unknown, out of range, or the engine's.
        MtpcError: as `mtpc.compile`.
    """
    if form not in get_args(Form):
        raise OptionError(f"form is {form!r}; expected one of {', '.join(get_args(Form))}")
    for name in _ENGINE_OPTIONS:
        if name in options:
            raise OptionError(f"{name} belongs to mtpc.compile; compile_host has no engine")
    with show_compiling(progress) as listener:
        assembler = Assembler(form, False, _cached, partial(_compiled, form))
        opened = open_steps(model, {"sampling": False, **options}, assembler, listener)
    return HostedModel(
        opened.served,
        opened.options,
        form,
        opened.device,
        opened.fallbacks,
        opened.made,
        opened.check,
        opened.cache,
    )


def _cached(steps: Steps, weights: WeightTable, source: WeightSource | None) -> Parts:
    """Packages of the graph cache, which share one table of weights."""
    return {key: CachedPart(step, weights, source) for key, step in steps.items()}


def _compiled(form: Form, compiler: StepCompiler) -> Parts:
    """Packages of this process, or graphs."""
    from mtpc.capture.split import split_step

    parts: Parts = {}
    graphs: dict[Part, StepGraph] = {}
    for key, part in graph_keys(compiler.options, form):
        if part == parts_of(key, form)[0]:
            graph = compiler.rewritten(key)
            graphs = {"step": graph}
            if form != "fused" and key.spec_tokens:
                split = split_step(graph)
                graphs |= {"verify": split.verify, "propose": split.propose}
        parts[key, part] = _lower(graphs[part], compiler.backend)
    return parts


def _lower(graph: StepGraph, backend: Backend) -> Lowered:
    """A package where the backend makes one, which opens over any tensors; else the graph."""
    if backend.package is None:
        for name, tensor in graph.buffers().items():  # No memory is held for stand-ins.
            set_tensor(graph.module, name, tensor.to("meta"))
        return GraphPart(graph, backend)
    directory = TemporaryDirectory(prefix="mtpc-host-")
    package = backend.package(graph, Path(directory.name))
    return PackagePart(graph.layout, directory, package, graph.weights)
