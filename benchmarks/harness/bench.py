"""A benchmark as a declaration: its options, the function that measures, and its table.

`Benchmark.main` is the command line of each, and `to_table` what `benchmarks.render` calls.
A function that measures gets a `Run`, and yields rows part by part. What is done is written after
each part and each round of samples, so that an interrupt loses the running one only.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import command, rounds
from benchmarks.harness.decoders import Prompts
from benchmarks.harness.machine import BandwidthProbe, describe_machine, describe_versions
from benchmarks.harness.models import SHAPES, Checkpoint, write_checkpoint
from benchmarks.harness.rounds import Case, Tell
from benchmarks.harness.tables import Record, Row, Table

HEADROOM = 32
"""Tokens by which max_len exceeds what is decoded."""


@dataclass
class Run:
    """One run of a benchmark.

    Attributes:
        benchmark: what runs.
        args: its command line.
        tell: hears of progress.
        workdir: for checkpoints, caches and logs.
        facts: entries of the record beside its rows.
        rows: of the parts that are done.
        failed: whether the exit code is 1.
    """

    benchmark: Benchmark
    args: argparse.Namespace
    tell: Tell
    workdir: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    failed: bool = False

    @cached_property
    def probe(self) -> BandwidthProbe:
        """Reads memory, of `--probe-mib`."""
        return BandwidthProbe(self.args.probe_mib << 20)

    @property
    def vocab_size(self) -> int:
        """Of `--shape`."""
        return SHAPES[self.args.shape].vocab_size

    @property
    def max_len(self) -> int:
        """For samples of `--prompt-tokens` and `--new-tokens`."""
        return int(self.args.prompt_tokens + self.args.new_tokens + HEADROOM)

    def write_mimo(self, accepting: bool = False) -> Checkpoint:
        """A checkpoint of `--shape`, with random weights or those that accept all drafts."""
        directory = self.workdir / ("accepting" if accepting else "random")
        self.tell(f"write {directory}")
        seed = getattr(self.args, "seed", 0)
        return write_checkpoint(directory, "mimo", SHAPES[self.args.shape], accepting, seed)

    def prompts(self, count: int, length: int | None = None) -> Prompts:
        """Random prompts of `--shape`'s ids, the same ones in every run; of `--prompt-tokens`."""
        length = length or self.args.prompt_tokens
        return rounds.random_prompts(count, length, self.vocab_size, self.args.seed)

    def sample(self, cases: Sequence[Case]) -> list[Row]:
        """The rows of cases, by `--repeats` and `--max-foreign`; each round is written."""
        args = self.args

        def rows() -> list[Row]:
            return [case.result(args.max_foreign) for case in cases]

        for _ in rounds.sample(cases, args.repeats, args.max_foreign, self.tell):
            self.write(rows())
        return rows()

    def write(self, more: Sequence[Row] = ()) -> Record:
        """Write what is measured so far, if `--out` is given; returns the record."""
        measured = {**self.facts, "rows": [*self.rows, *more]}
        record = new_record(self.benchmark.name, self.args, measured)
        write_record(self.args.out, record)
        return record

    def decode_options(self) -> dict[str, Any]:
        """Options of `mtpc.compile` for decode steps of `--batches`, and a prompt's prefill."""
        length = self.args.prompt_tokens
        return dict(
            batch_buckets=tuple(self.args.batches),
            max_len=self.max_len,
            prefill_chunk=length,
            busy_prefill_chunk=length,  # So that who was first still decodes with the last.
            backend=self.args.backend,
        )

    def earlier_rows(self, free: Sequence[str] = ()) -> list[Row]:
        """The rows of a run that ended early: of `--out`, if it exists.

        Args:
            free: arguments that may differ.

        Raises:
            SystemExit: another argument differs.
        """
        out = self.args.out
        if not out or not out.is_file():
            return []
        before, anything = json.loads(out.read_text()), dict.fromkeys(free)
        now = json.loads(json.dumps(new_record(self.benchmark.name, self.args, {})))
        if {**before["arguments"], **anything} != {**now["arguments"], **anything}:
            raise SystemExit(f"{out} has results of other arguments; give another --out")
        rows: list[Row] = before["rows"]
        return rows


Measure = Callable[[Run], Iterable[Iterable[Row]]]


@dataclass(frozen=True)
class Benchmark:
    """The declaration of a benchmark, which is a module of this package.

    Attributes:
        name: of the module.
        doc: its docstring, whose first line describes the command line.
        measure: yields rows, part by part.
        to_table: a record's table; as a rule `TableForm.of`.
        flags: options that several benchmarks have, with their usual defaults.
        defaults: such options with a default of this benchmark; one of a list takes several values.
        options: those of this benchmark alone, as `add_argument` takes them.
        check: refuses arguments by the parser's `error`, or settles them.
        child: the work of a process of its own, by its job; see `start_child`.
    """

    name: str
    doc: str | None
    measure: Measure
    to_table: Callable[[Record], Table]
    flags: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] | None = None
    child: Callable[[dict[str, Any]], Any] | None = None

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The command line."""
        parser = command.new_parser(self.name, self.doc, *self.flags, **self.defaults)
        for flag, how in self.options.items():
            parser.add_argument(flag, **how)
        if self.child:
            parser.add_argument("--child", help=argparse.SUPPRESS)
        args = parser.parse_args(argv)
        if self.check:
            self.check(parser, args)
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run, write what was asked for, and print; returns the exit code."""
        args = self.parse(argv)
        if self.child and args.child:
            print(json.dumps(self.child(json.loads(args.child))), flush=True)
            gc.freeze()  # As the command `mtpc` does before it ends.
            return 0
        tell = command.begin(args)
        with command.working_directory(getattr(args, "workdir", None)) as workdir:
            run = Run(self, args, tell, workdir)
            for part in self.measure(run):
                run.rows += part
                run.write()
        self.to_table(run.write()).print()
        return int(run.failed)

    def commands(self, module: str) -> tuple[Callable[..., int], Callable[[Record], Table]]:
        """`main` and `to_table`, for a module of this name; `main` runs if that is the program."""
        if module == "__main__":
            sys.exit(self.main())
        return self.main, self.to_table

    def start_child(self, job: Mapping[str, Any]) -> subprocess.Popen[str]:
        """A process that does a job, whose last line on standard output is its report."""
        line = [sys.executable, "-m", f"benchmarks.{self.name}", "--child", json.dumps(dict(job))]
        return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def read_report(process: subprocess.Popen[str], what: str) -> Any:
    """What a child process reports, after its end.

    Raises:
        SystemExit: it failed.
    """
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{what} ended with status {process.returncode}")
    return json.loads(said.splitlines()[-1])


ON_PAPER = {"cpu": "no machine: computed on paper"}
"""The `machine` of a record of figures that follow from sizes."""


def new_record(benchmark: str, args: argparse.Namespace, measured: Mapping[str, Any]) -> Record:
    """The record of a run.

    Args:
        benchmark: the module that ran.
        args: its command line; paths are left out, and so is what was not given.
        measured: what else the record holds, `rows` among it.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    arguments = {name: value for name, value in given.items() if not _has_path(value)}
    return {
        "benchmark": benchmark,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "arguments": arguments,
        **measured,
    }


def _has_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, list) and any(map(_has_path, value)))


def write_record(path: Path | None, record: Record) -> None:
    """Write a record as JSON, and the folders that it lacks; None writes nothing."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without indentation: samples of serving are traces, a line a number.
        path.write_text(json.dumps(record))
