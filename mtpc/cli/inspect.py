"""`mtpc inspect`: show the graph of one step at any point of the pass pipeline."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.config import CompileOptions
from mtpc.errors import OptionError
from mtpc.layout.display import Tell, show_progress

if TYPE_CHECKING:
    from rich.console import Console

    from mtpc.backends import Backend
    from mtpc.capture.graph import StepGraph
    from mtpc.layout import BufferSpec, Layout

NO_PASS = "no pass"


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    checkpoint = chosen_checkpoint(args.checkpoint)
    options = CompileOptions.parse(compile_options(args))
    if args.batch < 1:
        raise OptionError(f"--batch is {args.batch}; expected an integer >= 1")
    if args.svg is not None:
        _check_writable(args.svg)
    with show_progress(sys.stderr) as tell:
        graph, layouts, backend = _build(checkpoint, options, args, tell)
    if args.svg is not None:  # Before printing, so that `| head` does not prevent the drawing.
        from mtpc.cli.drawing import draw

        _write(args.svg, draw(graph, f"{_position(graph)}, {checkpoint.absolute().name}"))
        print(f"drawn to {args.svg}", file=sys.stderr)
    _print_graph(graph, layouts, args.nodes, backend)
    return 0


def _build(
    checkpoint: Path, options: CompileOptions, args: argparse.Namespace, tell: Tell
) -> tuple[StepGraph, list[Layout], str]:
    """The requested graph, its buffers' layout for every bucket of its phase, and the backend."""
    tell("import torch and transformers")
    from mtpc.backends import choose_backend, settle_prefill
    from mtpc.layout import Layout, StepKey
    from mtpc.models.load import load
    from mtpc.program.compiler import StepCompiler, step_keys
    from mtpc.program.open_cache import kernel_store
    from mtpc.weights.paired_checkpoint import open_checkpoint

    store = kernel_store(options, None)
    backend, fallback = choose_backend(
        options.backend, options.strict, tell, store, options.batch_invariant
    )
    if fallback:
        print(f"note: {fallback}", file=sys.stderr)
    last = _last_pass(options, backend, args.after, args.before)
    tell(f"load {checkpoint}")
    source = open_checkpoint(checkpoint, options.drafter)
    options = settle_prefill(options, source.dtype)
    needs_mtp = options.spec_tokens > 0
    loaded = load(source, options.dtype, needs_mtp, options.wiring, headers_only=True)
    compiler = StepCompiler(loaded, options, backend, new_buffer=Layout.reserve)
    compiler.weights.defers = True
    if args.phase == "decode":
        key = StepKey.decode(args.batch, options.spec_tokens)
    else:
        shared = replace(options, batch_buckets=(args.batch,), prefill_rows=args.batch)
        key = StepKey.prefill(*shared.prefill_shape, options.spec_tokens)
    tell(f"trace {key}")
    graph = compiler.trace(key)
    if last != NO_PASS:
        tell(f"rewrite {key} through {last or 'the last pass'}")
        compiler.rewrite(graph, last)
    keys = sorted({key, *(k for k in step_keys(options) if k.phase == args.phase)})
    specs = graph.layout.values()
    return graph, [Layout(specs, compiler.layout(k).sizes) for k in keys], backend.name


def _last_pass(
    options: CompileOptions, backend: Backend, after: str | None, before: str | None
) -> str | None:
    """The last pass to run: its name, None for the whole pipeline, or NO_PASS.

    Raises:
        OptionError: the requested pass is unknown or off.
    """
    from mtpc.passes import pass_names, select_passes

    wanted = after or before
    if wanted is None:
        return None
    enabled = (*options.enabled_passes, *backend.enables)
    selected = select_passes(
        {}, options.disabled_passes, enabled, options.draft_vocab, options.quantize
    )
    running = [step.name for step in (*selected, *backend.legalise())]
    if wanted not in running:
        if wanted in pass_names():
            raise OptionError(f"pass {wanted!r} is off; add --enable-pass {wanted}")
        near = difflib.get_close_matches(wanted, running, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"unknown pass {wanted!r}; {hint}passes: {', '.join(running)}")
    if after:
        return after
    return ([NO_PASS, *running])[running.index(wanted)]


def _position(graph: StepGraph) -> str:
    return f"after {graph.history[-1].name}" if graph.history else "as traced, before any pass"


def _print_graph(graph: StepGraph, layouts: Sequence[Layout], nodes: bool, backend: str) -> None:
    from mtpc.cli.tables import output

    console = output()
    title = f"{graph.key} {_position(graph)}: {graph.num_nodes} nodes, for backend {backend}"
    console.print(title, style="bold", soft_wrap=True)
    if nodes:
        console.print(graph.text(), soft_wrap=True)
        console.print()
    _print_history(console, graph)
    _print_counts(console, graph)
    _print_weights(console, graph)
    _print_buffers(console, graph, layouts)
    _print_growth(console, layouts[0])
    _print_effects(console, graph)


def _print_history(console: Console, graph: StepGraph) -> None:
    from mtpc.cli.tables import print_table

    columns = ("pass", "rewrites", "seconds", "nodes before", "after")
    rows = [
        (r.name, r.rewrites, f"{r.seconds:.3f}", r.nodes_before, r.nodes_after)
        for r in graph.history
    ]
    print_table(console, "Passes run", columns, rows)


def _print_counts(console: Console, graph: StepGraph) -> None:
    from mtpc.cli.anatomy import operations
    from mtpc.cli.tables import print_table

    counted = Counter(operations(graph))
    by_piece, by_operator = Counter[str](), Counter[str]()
    for (piece, name), count in counted.items():
        by_piece[piece] += count
        by_operator[name] += count
    total = ("total", counted.total())
    print_table(console, "Nodes by piece", ("piece", "nodes"), by_piece.most_common(), total)
    rows = [
        (name, count, ", ".join(p for (p, n), _ in counted.most_common() if n == name))
        for name, count in by_operator.most_common()
    ]
    print_table(console, "Nodes by operator", ("operator", "nodes", "in"), rows, (*total, ""))


def _print_weights(console: Console, graph: StepGraph) -> None:
    """Print the bytes of the weights that the step reads, by how they are stored."""
    from mtpc.cli.anatomy import weight_kinds
    from mtpc.cli.tables import format_bytes, print_table

    kinds = weight_kinds(graph)
    rows = [
        (kind, found.count, found.dequantised, format_bytes(found.nbytes))
        for kind, found in sorted(kinds.items(), key=lambda item: -item[1].nbytes)
    ]
    total = ("total", sum(k.count for k in kinds.values()), "",
             format_bytes(sum(k.nbytes for k in kinds.values())))  # fmt: skip
    columns = ("kind", "tensors", "dequantised", "size")
    print_table(console, "Weights", columns, rows, total)


def _print_buffers(console: Console, graph: StepGraph, layouts: Sequence[Layout]) -> None:
    """Print the shared buffers once, and the buffers of a bucket with their size in each bucket."""
    from mtpc.cli.anatomy import buffer_groups
    from mtpc.cli.tables import format_bytes, print_table

    names = ("buffer", "dims", "dtype", "pad", "writer")
    parts = ("Buffers shared by all buckets", True), ("Buffers of one bucket", False)
    for title, shared in parts:
        shown = layouts[:1] if shared else layouts
        groups = buffer_groups(
            graph.layout, (name for name, spec in graph.layout.items() if spec.shared == shared)
        )
        columns = (*names, *(_bucket_heading(layout, shared) for layout in shown))
        rows = [
            (
                *_spec_cells(group.label, group.spec),
                *(_size(layout, group.names) for layout in shown),
            )
            for group in groups
        ]
        sums = (sum(group.nbytes(layout) for group in groups) for layout in shown)
        total = ("total", *[""] * (len(names) - 1), *map(format_bytes, sums))
        print_table(console, title, columns, rows, total)


def _print_growth(console: Console, layout: Layout) -> None:
    """Print the memory of a request: its rows of the state, and its tokens in KV pages."""
    from mtpc.cli.anatomy import growth
    from mtpc.cli.tables import format_bytes
    from mtpc.layout.buffers import N, P, S

    page, request = growth(layout, N), growth(layout, S)
    console.print(
        f"A request costs {format_bytes(request)}, whatever its length, and "
        f"{format_bytes(page // layout.sizes[P])} per token, in pages of {layout.sizes[P]} "
        "tokens.\n"
    )


def _bucket_heading(layout: Layout, shared: bool) -> str:
    from mtpc.layout.buffers import Q, R

    return "size" if shared else f"R={layout.sizes[R]}, Q={layout.sizes[Q]}"


def _spec_cells(label: str, spec: BufferSpec) -> tuple[str, ...]:
    from mtpc.cli.tables import format_shape
    from mtpc.layout import dtype_name

    dims = format_shape(spec.dims)
    return label, dims, dtype_name(spec.dtype), str(spec.pad), ", ".join(spec.writers)


def _size(layout: Layout, names: Sequence[str]) -> str:
    from mtpc.cli.tables import format_bytes, format_shape

    times = f" x {len(names)}" if len(names) > 1 else ""
    total = sum(layout.nbytes(name) for name in names)
    return f"{format_shape(layout.shape(names[0]))}{times} {format_bytes(total)}"


def _print_effects(console: Console, graph: StepGraph) -> None:
    from mtpc.cli.tables import print_table

    columns = ("buffer", "order (w: write, r: read)", "written by", "read by")
    print_table(console, "Effects on buffers", columns, _effect_rows(graph))
    if any(node.op == "call_module" for node in graph.graph.nodes):
        text = "  The effects inside pieces are known after the pass fuse-draft-chain."
        console.print(text, style="dim")


def _effect_rows(graph: StepGraph) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row with the order of accesses, the writers and the readers of each buffer.

    Buffers of several layers share a row if these are the same.
    """
    from mtpc.cli.anatomy import accesses, actor, buffer_groups

    order: dict[str, list[str]] = {name: [] for name in graph.layout}
    actors: dict[tuple[str, str], Counter[str]] = {}
    for access in accesses(graph):
        what = actor(access.node)
        for kind, names in (("r", access.reads), ("w", access.writes)):
            for name in names:
                order[name].append(kind)
                actors.setdefault((name, kind), Counter())[what] += 1
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in graph.layout:
        runs = [(kind, len(list(run))) for kind, run in groupby(order[name])]
        in_order = " ".join(kind if n == 1 else f"{kind}{n}" for kind, n in runs)
        written, read = (_listing(actors.get((name, kind), Counter())) for kind in "wr")
        alike.setdefault((in_order or "-", written, read), []).append(name)
    for cells, members in alike.items():
        for group in buffer_groups(graph.layout, members):
            yield group.label, *cells


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{what} x {n}" if n > 1 else what for what, n in counts.items()) or "-"


def _check_writable(path: Path) -> None:
    """Check, before the work, that the file can be written after it."""
    if not path.parent.is_dir():
        raise OptionError(f"--svg {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise OptionError(f"--svg {path} is a directory; expected a file name")


def _write(path: Path, text: str) -> None:
    """Write the whole file, or nothing if interrupted."""
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as error:
        raise OptionError(f"--svg {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
