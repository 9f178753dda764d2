"""`mtpc inspect`: show the graph of one step at any point of the pass pipeline."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpc import CompileOptions
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.errors import OptionError
from mtpc.layout.display import Tell
from mtpc.layout.terminal import show_progress
from mtpc.plan import Plan, make_plan
from mtpc.weights.plain_file import write_output

if TYPE_CHECKING:
    from mtpc.backends import Backend
    from mtpc.capture.graph import StepGraph
    from mtpc.layout import Layout

NO_PASS = "no pass"


def command(args: argparse.Namespace) -> int:
    checkpoint = chosen_checkpoint(args.checkpoint)
    given = compile_options(args)
    CompileOptions.parse(given)
    if args.batch < 1:
        raise OptionError(f"--batch is {args.batch}; expected an integer >= 1")
    if args.svg is not None and not args.svg.parent.is_dir():
        raise OptionError(f"--svg {args.svg}: there is no directory {args.svg.parent}")
    if args.svg is not None and args.svg.is_dir():
        raise OptionError(f"--svg {args.svg} is a directory; expected a file name")
    if args.certificate and (args.after or args.before):
        raise OptionError("--certificate is about the whole step; leave out --after and --before")
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        graph, layouts, backend, drafter = _build(checkpoint, given, args, tell)
    if args.certificate:
        from mtpc.backends import make_backend
        from mtpc.cli.certificates import print_certificate
        from mtpc.program.compiler import certify

        artifact = make_backend(backend.partition(",")[0]).build(graph)
        print_certificate(certify(graph, artifact), f"{graph.name}, {backend}")
        return 0
    # These modules import torch.
    from mtpc.cli.anatomy import position
    from mtpc.cli.inspect_tables import print_graph

    if args.svg is not None:  # Before printing, so that `| head` does not prevent the drawing.
        from mtpc.cli.drawing import draw

        drawn = draw(graph, f"{position(graph)}, {checkpoint.absolute().name}")
        write_output(args.svg, drawn.encode())
        print(f"drawn to {args.svg}", file=sys.stderr)
    print_graph(graph, layouts, args.nodes, backend, drafter)
    return 0


def _build(
    checkpoint: Path, given: dict[str, Any], args: argparse.Namespace, tell: Tell
) -> tuple[StepGraph, list[Layout], str, dict[str, str]]:
    """The requested graph, its buffers' layout for every bucket of its phase, whom it is for (the
    backend, and of several ranks the first), and what its drafter declares."""
    from mtpc.backends import choose_backend
    from mtpc.layout import Layout, StepKey, step_keys
    from mtpc.models.load import load_planned
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.open_cache import kernel_store, plan_model
    from mtpc.ranks.group import all_parts

    source, plan = plan_model(checkpoint, CompileOptions.parse(given))
    store = kernel_store(plan, None)
    backend, fallback = choose_backend(plan.backend, plan.strict, tell, store, plan.batch_invariant)
    if fallback:
        print(f"note: {fallback}", file=sys.stderr)
    last = _last_pass(plan, backend, args.after, args.before)
    tell(f"load {checkpoint}")
    loaded = load_planned(source, plan, headers_only=True)
    first = all_parts(plan.tensor_parallel_size)[0]
    compiler = StepCompiler(loaded, plan, backend, new_buffer=Layout.reserve, ranks=first)
    compiler.weights.defers = True
    if args.phase == "decode":
        key = StepKey.decode(args.batch, plan.spec_tokens)
    else:
        sized = {"batch_buckets": (args.batch,), "prefill_rows": args.batch}
        shape = make_plan(CompileOptions.parse({**given, **sized}), plan.facts).prefill_shape
        key = StepKey.prefill(*shape, plan.spec_tokens)
    tell(f"trace {key}")
    graph = compiler.trace(key)
    if last != NO_PASS:
        tell(f"rewrite {key} through {last or 'the last pass'}")
        graph = compiler.rewrite(graph, last)
    keys = sorted({key, *(k for k in step_keys(plan) if k.phase == args.phase)})
    specs = graph.layout.values()
    of_rank = f", rank 0 of {first.size}" if first else ""
    layouts = [Layout(specs, compiler.layout(k).sizes) for k in keys]
    return graph, layouts, backend.name + of_rank, compiler.drafter(key)


def _last_pass(plan: Plan, backend: Backend, after: str | None, before: str | None) -> str | None:
    """The last pass to run: its name, None for the whole pipeline, or NO_PASS. Raises OptionError:
    the requested pass is unknown or off."""
    from mtpc.backends.pipeline import pass_names, select_passes
    from mtpc.passes.copy_layers import CopyLayers

    wanted = after or before
    if wanted is None:
        return None
    selected = select_passes(plan, backend.enables)
    running = [*(step.name for step in (*selected, *backend.legalise())), CopyLayers.name]
    if wanted not in running:
        if wanted in pass_names():
            raise OptionError(f"pass {wanted!r} is off; add --enable-pass {wanted}")
        near = difflib.get_close_matches(wanted, running, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"unknown pass {wanted!r}; {hint}passes: {', '.join(running)}")
    if after:
        return after
    return ([NO_PASS, *running])[running.index(wanted)]
