"""Checks the GPU backend, measures its speed and profiles it, in one call. Writes a CSV.

    python -m benchmarks.gpu --csv gpu.csv                 # within --deadline seconds, what fits
    python -m benchmarks.gpu --csv gpu.csv --resume        # the cases that the file lacks
    python -m benchmarks.gpu --dry-run --csv dry.csv       # no GPU: the null device, tiny shapes

The parts, in this order, are described in docs/gpu.md ("Measuring"): `ops`, `gate`, `sampling`,
`aot`, `kernels`, `speed`, `profile`. Most of the time is compilation. So a call runs the cases that
fit into its deadline, the most informative ones first, and lists what it left out. With
`--cache-dir`, a later call reuses compiled code.

Exit code 1: a check failed, or a case raised an error. 2: there is no GPU, and no --dry-run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.gpu.aot import COMPARED as AOT_COMPARED
from benchmarks.gpu.aot import FAMILY as AOT_FAMILY
from benchmarks.gpu.aot import check_aot
from benchmarks.gpu.gate import (
    COMPARED,
    FAMILIES,
    INVARIANT,
    SAMPLED,
    SAMPLED_FAMILY,
    TELLING,
    check_family,
    check_invariance,
    check_sampling,
    check_shape,
)
from benchmarks.gpu.kernels import kernel_times
from benchmarks.gpu.machine import Machine, gpu_machine
from benchmarks.gpu.models import MEASURED, SHAPES
from benchmarks.gpu.ops import check_op, op_rows
from benchmarks.gpu.rows import FIGURES, Row, RowFile, figures, findings
from benchmarks.gpu.schedule import Schedule
from benchmarks.gpu.speed import Bench, Plan, Task, profiles, tasks, telling_case
from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.rounds import Tell
from benchmarks.harness.tables import Table
from mtpc.errors import MtpcError

PARTS = ("ops", "gate", "sampling", "aot", "kernels", "speed", "profile")
GATED = (1, 3)
"""K of a measured shape's gates."""
TIMED = {"kernels", "speed", "profile"}
CHECKS_SHARE = 0.5
"""Share of the deadline for the checks, if measurements follow."""
CACHES = {
    "MTPC_CACHE_DIR": "mtpc",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Folders of --cache-dir, by environment variable."""


@dataclass
class Session:
    """The state of one call.

    Attributes:
        machine: where it runs.
        schedule: what still fits.
        file: the CSV.
        tell: called with progress.
        plan: what is decoded.
        rows: of this call.
        bench: the shape that is loaded: one at a time.
    """

    machine: Machine
    schedule: Schedule
    file: RowFile
    tell: Tell
    plan: Plan
    rows: list[Row] = field(default_factory=list)
    bench: Bench | None = None

    def attempt(
        self,
        kind: str,
        rows: Sequence[Row],
        work: Callable[[Sequence[Row]], Iterable[Row]],
        share: float = 1.0,
    ) -> None:
        """Fill rows that the file lacks, if there is time; an error is a row, too, and the end of
        none but its own case."""
        wanted = [row for row in rows if row.case not in self.file.there]
        what = "; ".join(" ".join(row.case) for row in wanted)
        if not wanted or not self.schedule.fits(kind, what, share):
            return
        self.tell(what)
        with self.schedule.timed(kind):
            try:
                for row in work(wanted):
                    self.add(row)
            except Exception as error:
                traceback.print_exc()
                for row in (row for row in wanted if row.case not in self.file.there):
                    row.passed, row.note = False, f"{type(error).__name__}: {error}"
                    self.add(row)

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        self.file.add(row)

    def open(self, shape: str) -> Bench:
        """Load a shape's model, after dropping the previous one."""
        if self.bench is None or self.bench.shape != shape:
            self.bench = None
            self.bench = Bench.open(self.machine, shape, self.plan)
        return self.bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    schedule, tell = Schedule(args.deadline), command.teller()
    for variable, folder in CACHES.items() if args.cache_dir else ():
        os.environ[variable] = str(args.cache_dir.resolve() / folder)
    command.quiet()
    try:
        machine = Machine() if args.dry_run else gpu_machine()
    except MtpcError as error:
        print(f"{error}; --dry-run goes through every step on the null device", file=sys.stderr)
        return 2
    tell(f"on {machine.name}")
    with command.working_directory(args.workdir) as workdir:
        plan = Plan(args.prompt_tokens, args.new_tokens, args.max_len, args.layers, workdir)
        session = Session(machine, schedule, RowFile(args.csv, args.resume), tell, plan)
        _check(session, args, CHECKS_SHARE if TIMED & set(args.parts) else 1.0)
        _measure(session, args)
    _report(session)
    return int(any(row.passed is False for row in session.rows))


def _check(session: Session, args: argparse.Namespace, share: float) -> None:
    machine, workdir = session.machine, session.plan.workdir

    def attempt(kind: str, row: Row, check: Callable[[Row], Row]) -> None:
        session.attempt(kind, [row], lambda rows: map(check, rows), share)

    rows = list(op_rows(machine)) if "ops" in args.parts else []
    unknown = {*(args.operators or ())} - {row.shape for row in rows}
    if unknown:
        names = ", ".join(sorted({row.shape for row in rows}))
        sys.exit(f"--operators {' '.join(sorted(unknown))}: not of the part ops; it has {names}")
    for row in (row for row in rows if row.shape in (args.operators or (row.shape,))):
        attempt("ops", row, lambda row: check_op(machine, row))
    for name in args.families if "gate" in args.parts else ():
        row = Row("gate", machine.name, name, COMPARED, 3, 2)
        attempt("gate", row, lambda row: check_family(row, machine, workdir / f"tiny-{row.shape}"))
    shapes = args.shapes if "gate" in args.parts else ()
    for name, k in itertools.product(shapes, GATED):
        row = Row("gate", machine.name, name, COMPARED, k, 1)
        attempt("gate", row, lambda row: check_shape(row, machine, workdir / f"gate-{row.shape}"))
    telling = TELLING[:1] if machine.is_dry else TELLING
    for name in telling if "gate" in args.parts else ():
        row = Row("invariance", machine.name, name, INVARIANT, 3, 4)
        attempt("gate", row, lambda r: check_invariance(r, machine, workdir / f"tiny-{r.shape}"))
    if "sampling" in args.parts:
        row = Row("sampling", machine.name, SAMPLED_FAMILY, SAMPLED, 3, 2)
        attempt("gate", row, lambda r: check_sampling(r, machine, workdir / f"tiny-{r.shape}"))
    if "aot" in args.parts:
        row = Row("aot", machine.name, AOT_FAMILY, AOT_COMPARED, 3, 2)
        attempt("gate", row, lambda row: check_aot(row, machine, workdir / f"tiny-{row.shape}"))


def _measure(session: Session, args: argparse.Namespace) -> None:
    """Run all timed cases, then the profiles, because torch's profiler slows down later work."""
    no_kernels = "kernels" not in args.parts or session.machine.is_dry
    for row, fill in () if no_kernels else kernel_times(session.machine):
        session.attempt("kernels", [row], partial(map, fill))
    todo: list[Task] = []
    if "speed" in args.parts:
        todo += tasks(args.shapes, args.spec_tokens, args.batches)
    if "profile" in args.parts:
        todo += profiles(args.shapes, telling_case(args.spec_tokens, args.batches))
    for task in todo:

        def work(rows: Sequence[Row], task: Task = task) -> Iterable[Row]:
            bench = session.open(task.shape)
            return (bench.profile if task.kind == "profile" else bench.measure)(task.case, rows)

        session.attempt(task.kind, task.rows(session.machine), work)


def _report(session: Session) -> None:
    dry = "a dry run on the null device: nothing was compiled, and no time means anything"
    notes = [dry] if session.machine.is_dry else list(findings(session.rows))
    if left_out := session.schedule.left_out:
        notes.append(f"left out for want of time: {'; '.join(left_out)}; see --resume")
    shown = [_cells(row) for row in session.rows if row.part != "kernel"]
    Table("GPU", ("part", "shape", "engine", *FIGURES, "result"), shown, notes).print()


def _cells(row: Row) -> list[str]:
    result = {None: row.note, True: "passed", False: f"FAILED {row.note}"}[row.passed]
    return [row.part, row.shape, row.engine, *figures(vars(row)), result]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dry-run", action="store_true", help="the null device and tiny shapes; for no GPU")
    add("--csv", type=Path, metavar="FILE", help="write rows here as they are found")
    add("--resume", action="store_true", help="keep the file's rows, add those it lacks")
    add("--deadline", type=positive, default=400, metavar="S", help="to end by, as far as known")
    add("--cache-dir", type=Path, metavar="DIR", help="keep what is compiled: a later call is warm")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--operators", nargs="+", metavar="NAME", help="of the part ops; default: all")
    add("--families", nargs="+", choices=("all", *FAMILIES), default=TELLING, help="of the gate")
    add("--shapes", nargs="+", choices=tuple(SHAPES), help="default: " + ", ".join(MEASURED))
    add("--spec-tokens", nargs="+", type=int, default=(0, 1, 2, 3, 4), metavar="K")
    add("--batches", nargs="+", type=positive, metavar="N", help="default: 1 4 16 64")
    add("--layers", type=positive, metavar="N", help="decoder layers instead of the shape's")
    add("--prompt-tokens", type=positive, default=64, metavar="N")
    add("--new-tokens", type=positive, metavar="N", help="decoded per request; default: 128")
    add("--max-len", type=positive, metavar="N", help="of the steps; default: 4096")
    add("--workdir", type=Path, help="for checkpoints; kept; default: a temporary one")
    args = parser.parse_args(argv)
    args.families = FAMILIES if "all" in args.families else args.families
    tiny = [name for name in SHAPES if name.startswith("tiny-")]
    args.shapes = args.shapes or (tiny if args.dry_run else MEASURED)
    args.batches = args.batches or ((1, 2) if args.dry_run else (1, 4, 16, 64))
    args.new_tokens = args.new_tokens or (12 if args.dry_run else 128)
    decoded = args.prompt_tokens + 2 * args.new_tokens + 32
    args.max_len = args.max_len or (decoded if args.dry_run else 4096)
    if args.max_len < decoded:
        parser.error(f"--max-len {args.max_len}: prompts and new tokens take up to {decoded}")
    return args


if __name__ == "__main__":
    sys.exit(main())
