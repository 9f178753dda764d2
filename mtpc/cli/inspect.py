"""`mtpc inspect`: show the graph of one step at any point of the pass pipeline."""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.run import settle_drafts
from mtpc.config import CompileOptions
from mtpc.errors import OptionError
from mtpc.layout.display import Tell, show_progress
from mtpc.weights.plain_file import write_output

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.capture.graph import StepGraph
    from mtpc.layout import Layout

NO_PASS = "no pass"


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    checkpoint = chosen_checkpoint(args.checkpoint)
    given = compile_options(args)
    CompileOptions.parse(given)
    if args.batch < 1:
        raise OptionError(f"--batch is {args.batch}; expected an integer >= 1")
    if args.svg is not None and not args.svg.parent.is_dir():
        raise OptionError(f"--svg {args.svg}: there is no directory {args.svg.parent}")
    if args.svg is not None and args.svg.is_dir():
        raise OptionError(f"--svg {args.svg} is a directory; expected a file name")
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        options = CompileOptions.parse(settle_drafts(checkpoint, given))
        if args.certificate and (args.after or args.before):
            raise OptionError(
                "--certificate is about the whole step; leave out --after and --before"
            )
        graph, layouts, backend = _build(checkpoint, options, args, tell)
    if args.certificate:
        _print_certificate(graph, backend)
        return 0
    # These modules import torch.
    from mtpc.cli.anatomy import position
    from mtpc.cli.inspect_tables import print_graph

    if args.svg is not None:  # Before printing, so that `| head` does not prevent the drawing.
        from mtpc.cli.drawing import draw

        drawn = draw(graph, f"{position(graph)}, {checkpoint.absolute().name}")
        write_output(args.svg, drawn.encode())
        print(f"drawn to {args.svg}", file=sys.stderr)
    print_graph(graph, layouts, args.nodes, backend)
    return 0


def _build(
    checkpoint: Path, options: CompileOptions, args: argparse.Namespace, tell: Tell
) -> tuple[StepGraph, list[Layout], str]:
    """The requested graph, its buffers' layout for every bucket of its phase, and whom it is for:
    the backend, and of several ranks the first."""
    from mtpc.backends import choose_backend, settle_prefill
    from mtpc.layout import Layout, StepKey, step_keys
    from mtpc.models.load import load
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.open_cache import kernel_store
    from mtpc.program.ranks import all_parts
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
    first = all_parts(options.tensor_parallel_size)[0]
    compiler = StepCompiler(loaded, options, backend, new_buffer=Layout.reserve, ranks=first)
    compiler.weights.defers = True
    if args.phase == "decode":
        key = StepKey.decode(args.batch, options.spec_tokens)
    else:
        shared = replace(options, batch_buckets=(args.batch,), prefill_rows=args.batch)
        key = StepKey.prefill(*shared.prefill_shape, options.spec_tokens)
    tell(f"trace {key}")
    graph = compiler.rewritten(key) if args.certificate else compiler.trace(key)
    if last != NO_PASS and not args.certificate:
        tell(f"rewrite {key} through {last or 'the last pass'}")
        compiler.rewrite(graph, last)
    keys = sorted({key, *(k for k in step_keys(options) if k.phase == args.phase)})
    specs = graph.layout.values()
    of_rank = f", rank 0 of {first.size}" if first else ""
    return graph, [Layout(specs, compiler.layout(k).sizes) for k in keys], backend.name + of_rank


def _print_certificate(graph: StepGraph, backend: str) -> None:
    from mtpc.backends import BACKENDS
    from mtpc.backends.lower_tape import lower_to_tape
    from mtpc.backends.tape import write_tape
    from mtpc.capture.listing import listing
    from mtpc.certificate import prove
    from mtpc.cli.certificates import print_certificate

    row = BACKENDS[backend.partition(",")[0]]
    tape = write_tape(*lower_to_tape(graph)).encode() if row.has_packages else None
    print_certificate(prove(listing(graph), tape, tape is None), f"{graph.name}, {backend}")


def _last_pass(
    options: CompileOptions, backend: Backend, after: str | None, before: str | None
) -> str | None:
    """The last pass to run: its name, None for the whole pipeline, or NO_PASS.

    Raises:
        OptionError: the requested pass is unknown or off.
    """
    from mtpc.backends.pipeline import pass_names, select_passes

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
