"""`mtpc build`: compile every step of a checkpoint into the graph cache, and list what is there."""

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
    from mtpc.build import BuildReport, Built


def command(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    given = compile_options(args)
    tiers = given.pop("spec_tokens", (CompileOptions.spec_tokens,))
    for k in tiers:
        options = CompileOptions.parse({**given, "spec_tokens": k})
    if options.spec_tiers:  # One program, whose steps are for several K.
        tiers = (options.spec_tokens,)
    if options.backend not in ("auto", "cpu"):
        raise OptionError(
            f"backend {options.backend!r} compiles nothing ahead of time; expected cpu"
        )
    checkpoint = args.checkpoint or demo_checkpoint()
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        from mtpc.build import build

        set_threads(args.threads, checkpoint)
        listener = stage_listener(tell)
        report = build(checkpoint, options, tuple(tiers), args.split, args.jobs, listener)
    _print(report)
    return 0


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
