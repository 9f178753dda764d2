"""`mtpc build`: compile every step of a checkpoint into the graph cache, and list the entries.

With `--target` it instead compiles the steps' GPU kernels, for a GPU that this machine need not
have.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mtpc import CompileOptions
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.opening import set_threads
from mtpc.cli.tables import format_bytes, print_table, say
from mtpc.errors import OptionError
from mtpc.layout.display import stage_listener
from mtpc.layout.terminal import show_progress
from mtpc.program.processes import without_collections

if TYPE_CHECKING:
    from mtpc.backends.targets import Target
    from mtpc.layout import Form
    from mtpc.program.build import BuildReport, Built, CrossReport


def command(args: argparse.Namespace) -> int:
    given = compile_options(args)
    targets = _targets(args, given)
    programs = _programs({**given, "backend": "cuda"} if targets else given)
    from mtpc.backends import PACKAGING, first_choice

    row = first_choice(programs[0].backend)
    if not targets and (row is None or not row.makes_files):
        raise OptionError(
            f"backend {programs[0].backend!r} compiles nothing ahead of time; expected {PACKAGING}"
        )
    checkpoint = chosen_checkpoint(args.checkpoint)
    with show_progress(sys.stderr, args.quiet) as tell, without_collections():
        tell("import torch and transformers")
        from mtpc.program.build import build, build_for_targets
        from mtpc.program.open_cache import plan_model
        from mtpc.program.workers import keeping_tokenizer
        from mtpc.ranks.group import all_parts

        set_threads(args.threads, checkpoint)
        opened = [plan_model(checkpoint, asked) for asked in programs]
        plans, (source, _) = [plan for _, plan in opened], opened[0]
        listener = stage_listener(tell, args.verbose)
        if targets:
            compiled = build_for_targets(checkpoint, plans, targets, listener)
        else:
            form: Form = "both" if args.split else "fused"
            parts = all_parts(plans[0].tensor_parallel_size)
            with keeping_tokenizer(plans[0].cache_dir, source.directory, args.jobs):
                built = build(checkpoint, plans, form, args.jobs, listener, parts=parts)
    if args.as_json:
        args.result = _kernels_as_json(compiled) if targets else _as_json(built)
    elif targets:
        _print_kernels(compiled)
    else:
        _print(built)
    return 0


def _programs(given: dict[str, Any]) -> list[CompileOptions]:
    """The options of each program to build: one for each K, one for all with "auto"."""
    numbers = given.get("spec_tokens")
    each = numbers if isinstance(numbers, tuple) else (numbers,)
    return [CompileOptions.parse({**given, "spec_tokens": k}) for k in each]


def _targets(args: argparse.Namespace, given: dict[str, Any]) -> list[Target]:
    """The GPUs of `--target`.

    Raises:
        OptionError: options suit no target, or one is unknown.
        BackendError: Triton is missing.
    """
    if not args.target:
        return []
    if given.get("backend", "auto") not in ("auto", "cuda") or args.split or args.jobs is not None:
        raise OptionError(
            "--target compiles kernels for backend cuda, in one process; drop --split, --jobs and "
            "any other --backend"
        )
    from mtpc.backends.targets import parse_target
    from mtpc.backends.triton_kernels import load_kernels

    targets = [parse_target(name) for name in args.target]
    load_kernels()
    return targets


def _kernels_as_json(report: CrossReport) -> dict[str, Any]:
    rows = [
        {
            "kernel": made.kernel,
            "target": made.target.name,
            "entry": made.entry.digest,
            "bytes": made.resources.nbytes,
            "shared_bytes": made.resources.shared_bytes,
            "registers": made.resources.registers,
            "spills": made.resources.spills,
            "was_there": made.was_there,
        }
        for made in report.kernels
    ]
    launches = {str(key): count for key, count in report.launches.items()}
    notes, root = dict(report.notes), str(report.root)
    return {"root": root, "kernels": rows, "launches": launches, "notes": notes,
            "elapsed_s": report.elapsed_s}  # fmt: skip


def _print_kernels(report: CrossReport) -> None:
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
            "cached" if made.was_there else "built",
        )
        for made in report.kernels
    ]
    columns = ("kernel", "target", "entry", "size", "shared memory", "registers", "spills", "")
    print_table(f"In {report.root}", columns, rows)
    for key, count in report.launches.items():
        say(f"{key}: {count} launches of these kernels")
    for note, times in report.notes.items():
        say(f"{times} times: {note}")
    say(
        "Inductor compiles the operations between these kernels on the GPU's own machine, at the "
        "first start; this command ran no kernel"
    )
    say(f"built in {report.elapsed_s:.1f} s")


def _as_json(report: BuildReport) -> dict[str, Any]:
    steps = [
        {
            "step": built.step.record.name,
            "entry": built.step.entry.digest,
            "bytes": built.step.entry.nbytes,
            "seconds": dict(built.step.record.seconds),
            "was_there": built.was_there,
        }
        for built in report.steps
        if built.step.entry is not None
    ]
    pins = {str(k): pin for k, pin in report.pins.items()}
    return {"root": str(report.root), "kernels": report.kernels.digest, "steps": steps,
            "require_sha256": pins, "elapsed_s": report.elapsed_s}  # fmt: skip


def _print(report: BuildReport) -> None:
    total = sum(step.step.entry.nbytes for step in report.steps if step.step.entry)
    stages = ("trace", "rewrite", "lower")
    seconds = [[b.step.record.seconds.get(s, 0.0) for s in stages] for b in report.steps]
    sums = [f"{sum(column):.1f} s" for column in zip(*seconds, strict=True)]
    print_table(
        f"In {report.root}",
        ("step", "entry", "nodes", "after passes", *stages, "size", ""),
        map(_row, report.steps, seconds),
        ("", "", "", "total", *sums, format_bytes(total), ""),
    )
    kernels = report.kernels
    say(f"kernels: entry {kernels.digest[:8]}, {format_bytes(kernels.nbytes)}")
    for k, pin in report.pins.items():
        say(f"K={k}: to load only these entries, use --require-sha256 {pin}")
    say(f"built in {report.elapsed_s:.1f} s")


def _row(built: Built, seconds: list[float]) -> tuple[str, ...]:
    record, entry = built.step.record, built.step.entry
    assert entry is not None  # `build` has read each step from the cache.
    return (
        record.name if built.ranks is None else f"{record.name}, rank {built.ranks.rank}",
        entry.digest[:8],
        str(record.history[0].nodes_before),
        str(record.history[-1].nodes_after),
        *(f"{stage:.1f} s" for stage in seconds),
        format_bytes(entry.nbytes),
        "cached" if built.was_there else "built",
    )
