"""`mtpc build`: compile every step of a checkpoint into the graph cache, and list what is there.

With `--target`, the GPU kernels of the steps, for a device that need not be here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtpc.cli.arguments import compile_options
from mtpc.cli.demo import demo_checkpoint
from mtpc.cli.progress import show_progress
from mtpc.cli.run import set_threads, stage_listener
from mtpc.config import CompileOptions
from mtpc.errors import OptionError

if TYPE_CHECKING:
    from mtpc.program.build import BuildReport, Built
    from mtpc.program.cross_compile import CrossReport


def command(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    given = compile_options(args)
    tiers = given.pop("spec_tokens", (CompileOptions.spec_tokens,))
    for k in tiers:
        options = CompileOptions.parse({**given, "spec_tokens": k})
    if options.spec_tiers:  # One program, whose steps are for several K.
        tiers = (options.spec_tokens,)
    if args.target:
        return _for_targets(args, options, tuple(tiers))
    if options.backend not in ("auto", "cpu"):
        raise OptionError(
            f"backend {options.backend!r} compiles nothing ahead of time; expected cpu"
        )
    checkpoint = args.checkpoint or demo_checkpoint()
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        from mtpc.program.build import build

        set_threads(args.threads, checkpoint)
        listener = stage_listener(tell)
        report = build(checkpoint, options, tuple(tiers), args.split, args.jobs, listener)
    _print(report)
    return 0


def _for_targets(args: argparse.Namespace, options: CompileOptions, tiers: tuple[int, ...]) -> int:
    """Compile kernels for devices that need not be here."""
    if options.backend not in ("auto", "cuda") or args.split or args.jobs is not None:
        raise OptionError(
            "--target compiles kernels for backend cuda, in one process; drop --split, --jobs and "
            "any other --backend"
        )
    from mtpc.backends.targets import parse_target

    targets = [parse_target(name) for name in args.target]
    checkpoint = args.checkpoint or demo_checkpoint()
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        from mtpc.backends.triton_kernels import load_kernels

        load_kernels()  # Says clearly that there is no Triton, where there is none.
        from mtpc.program.cross_compile import build_kernels

        set_threads(args.threads, checkpoint)
        report = build_kernels(checkpoint, options, tiers, targets, stage_listener(tell))
    _print_kernels(report)
    return 0


def _print_kernels(report: CrossReport) -> None:
    from mtpc.cli.tables import format_bytes, output, print_table

    console = output()
    rows = [
        (
            made.kernel,
            made.target.name,
            made.entry.digest[:8],
            format_bytes(made.resources.nbytes),
            f"{format_bytes(made.resources.shared_bytes)}"
            f" of {format_bytes(made.target.shared_bytes)}",
            str(made.resources.registers),
            f"{made.resources.spills}{' B' if made.target.vendor == 'cuda' else ''}",
            "was there" if made.was_there else "built",
        )
        for made in report.kernels
    ]
    columns = ("kernel", "target", "entry", "size", "shared memory", "registers", "spills", "")
    print_table(console, f"In {report.root}", columns, rows)
    for key, count in report.launches.items():
        console.print(f"{key}: {count} launches of these kernels")
    for note, times in report.notes.items():
        console.print(f"{times} times: {note}", soft_wrap=True)
    console.print(
        "what lies between these kernels is compiled by Inductor on the device itself, at its "
        "first start; nothing of this was run",
        soft_wrap=True,
    )
    console.print(f"built in {report.elapsed_s:.1f} s")


def _print(report: BuildReport) -> None:
    from mtpc.cli.tables import format_bytes, output, print_table

    console = output()
    total = sum(step.step.entry.nbytes for step in report.steps if step.step.entry)
    sums = [sum(column) for column in zip(*(_seconds(b) for b in report.steps), strict=True)]
    print_table(
        console,
        f"In {report.root}",
        ("step", "entry", "nodes", "after passes", "trace", "rewrite", "lower", "size", ""),
        [*_rows(report)],
        ("", "", "", "total", *(f"{s:.1f} s" for s in sums), format_bytes(total), ""),
    )
    kernels = report.kernels
    console.print(f"kernels: entry {kernels.digest[:8]}, {format_bytes(kernels.nbytes)}")
    for k, pin in report.pins.items():
        console.print(f"K={k}: to load this and nothing else, --require-sha256 {pin}")
    console.print(f"built in {report.elapsed_s:.1f} s")


def _seconds(built: Built) -> list[float]:
    return [built.step.record.seconds.get(stage, 0.0) for stage in ("trace", "rewrite", "lower")]


def _rows(report: BuildReport) -> Iterator[tuple[str, ...]]:
    from mtpc.cli.tables import format_bytes

    for built in report.steps:
        record, entry = built.step.record, built.step.entry
        assert entry is not None  # `build` has read them from the cache
        yield (
            record.name,
            entry.digest[:8],
            str(record.history[0].nodes_before),
            str(record.history[-1].nodes_after),
            *(f"{seconds:.1f} s" for seconds in _seconds(built)),
            format_bytes(entry.nbytes),
            "was there" if built.was_there else "built",
        )
