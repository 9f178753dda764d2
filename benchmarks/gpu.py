"""The GPU in one call: that it is right, how fast it is, what it launches. Writes a CSV.

    python -m benchmarks.gpu --csv gpu.csv                 # within --deadline seconds, what fits
    python -m benchmarks.gpu --csv gpu.csv --resume        # the cases that the file lacks
    python -m benchmarks.gpu --dry-run --csv /tmp/dry.csv  # no GPU: the null device, tiny shapes

Three parts. `gate`: each family's tiny model, drafting, emits what the uncompiled reference emits
without drafts, and accepts what that accepts with them. `speed`: bfloat16, weights that accept all
drafts, by shape, batch and K, against transformers, its `use_mtp`, and our own pieces: compiled and
launched one by one, or captured as a graph each, as servers do. `profile`: kernels per iteration
and its time, with the default passes, without the optional ones, and with norms and the draft's
entry fused by us instead of by Inductor. Most of the time goes into compiling, so a call does
what its deadline allows, the most telling cases first, and says what it left out.

Exit code 1: a gate failed. 2: there is no GPU, and no --dry-run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from benchmarks.command import Tell, positive, print_results, teller, working_directory
from benchmarks.gpu_gate import COMPARED, FAMILIES, check_family
from benchmarks.gpu_machine import GpuMachine, Machine, NullMachine
from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_rows import Row, RowFile, findings
from benchmarks.gpu_speed import Bench, Case, Plan, cases
from mtpc.errors import MtpcError

PARTS = ("gate", "speed", "profile")
GATE_SHARE = 0.4
"""Of the deadline, while there is anything to measure after the gates."""
COLUMNS = ("part", "shape", "engine", "K", "batch", "ms/step", "on device", "host us", "launches",
           "kernels", "tokens/s", "accepted", "of bandwidth", "result")  # fmt: skip


@dataclass
class Session:
    """One call: where, until when, and what was found.

    Attributes:
        machine: where it runs.
        deadline: when no further case is begun, as `time.monotonic` counts.
        file: the CSV.
        tell: hears of progress.
        rows: of this call.
        left_out: cases that the deadline did not allow.
        start: when it began.
    """

    machine: Machine
    deadline: float
    file: RowFile
    tell: Tell
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def is_late(self, share: float = 1.0) -> bool:
        """Whether so much of the time is gone that nothing may begin."""
        return time.monotonic() > self.start + share * (self.deadline - self.start)

    def wants(self, row: Row) -> bool:
        """Whether a case is still to be measured, and there is time for it."""
        if row.case in self.file.there:
            return False
        if self.is_late():
            self.left_out.append(" ".join(row.case))
            return False
        self.tell(" ".join(row.case))
        return True

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        self.file.add(row)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tell = teller()
    try:
        machine: Machine = NullMachine() if args.dry_run else GpuMachine()
    except MtpcError as error:
        print(f"{error}; --dry-run goes through every step on the null device", file=sys.stderr)
        return 2
    session = Session(
        machine, time.monotonic() + args.deadline, RowFile(args.csv, args.resume), tell
    )
    tell(f"on {machine.name}")
    with working_directory(args.workdir) as workdir:
        if "gate" in args.parts:
            _gate(session, args.families, workdir, GATE_SHARE if len(args.parts) > 1 else 1.0)
        plan = Plan(args.prompt_tokens, args.new_tokens, args.layers, workdir)
        wanted = cases(args.spec_tokens, args.batches)
        for shape in args.shapes if {"speed", "profile"} & set(args.parts) else ():
            _measure(session, shape, plan, wanted, args.parts)
    _report(session)
    return int(any(row.passed is False for row in session.rows))


def _gate(session: Session, families: Sequence[str], workdir: Path, share: float) -> None:
    for name in families:
        row = Row("gate", session.machine.name, name, COMPARED, 3, 2)
        if session.is_late(share) and row.case not in session.file.there:
            session.left_out.append(f"gate {name}")
        elif session.wants(row):
            session.add(check_family(name, session.machine, workdir / f"tiny-{name}"))


def _measure(
    session: Session, shape: str, plan: Plan, wanted: Sequence[Case], parts: Sequence[str]
) -> None:
    if session.is_late():
        session.left_out.append(f"all of {shape}")
        return
    session.tell(f"make {shape}")
    bench = Bench.open(session.machine, shape, plan)
    for case in wanted if "speed" in parts else ():
        for row in bench.rows(case, session.wants):
            session.add(row)
    most = Case(max(case.spec_tokens for case in wanted), min(case.batch for case in wanted))
    for row in _profile(session, bench, most) if "profile" in parts else ():
        session.add(row)


def _profile(session: Session, bench: Bench, case: Case) -> Iterator[Row]:
    if session.is_late():
        session.left_out.append(f"profile {bench.shape}")
        return
    session.tell(f"profile {bench.shape}")
    yield from bench.profile(case)


def _report(session: Session) -> None:
    dry = "a dry run on the null device: nothing was compiled, and no time means anything"
    notes = [dry] if session.machine.is_dry else list(findings(session.rows))
    if session.left_out:
        notes.append(f"left out for want of time: {'; '.join(session.left_out)}; see --resume")
    print_results("GPU", COLUMNS, [_cells(row) for row in session.rows], notes)


def _cells(row: Row) -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    result = {None: row.note, True: "passed", False: f"FAILED {row.note}"}[row.passed]
    return [
        row.part, row.shape, row.engine, str(row.spec_tokens), str(row.batch),
        show(row.ms_step, ".3f"), show(row.ms_device, ".3f"), show(row.host_us, ".0f"),
        show(row.launches, ".0f"), show(row.kernels, "d"), show(row.tokens_per_s, ".0f"),
        show(row.acceptance, ".0%"), show(row.of_bandwidth, ".0%"), result,
    ]  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dry-run", action="store_true", help="the null device and tiny shapes; for no GPU")
    add("--csv", type=Path, metavar="FILE", help="write rows here as they are found")
    add("--resume", action="store_true", help="keep the file's rows, add those it lacks")
    add("--deadline", type=positive, default=540, metavar="S", help="begin nothing after so long")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="of the gate")
    add("--shapes", nargs="+", choices=tuple(SHAPES), help="default: the two large ones")
    add("--spec-tokens", nargs="+", type=int, default=(0, 1, 2, 3, 4), metavar="K")
    add("--batches", nargs="+", type=positive, metavar="N", help="default: 1 4 16 64")
    add("--layers", type=positive, metavar="N", help="decoder layers instead of the shape's")
    add("--prompt-tokens", type=positive, default=64, metavar="N")
    add("--new-tokens", type=positive, metavar="N", help="decoded per request; default: 128")
    add("--workdir", type=Path, help="for checkpoints; kept; default: a temporary one")
    args = parser.parse_args(argv)
    tiny = [name for name in SHAPES if name.startswith("tiny-")]
    large = [name for name in SHAPES if name not in tiny]
    args.shapes = args.shapes or (tiny if args.dry_run else large)
    args.batches = args.batches or ((1, 2) if args.dry_run else (1, 4, 16, 64))
    args.new_tokens = args.new_tokens or (12 if args.dry_run else 128)
    return args


if __name__ == "__main__":
    sys.exit(main())
