"""Seconds from the start of a process to its first token, of mtpc, other engines and the floor.

    python -m benchmarks.startup                     # the demo model and the 0.5B shape
    python -m benchmarks.startup --vllm-python VENV/bin/python --repeats 5
    python -m benchmarks.startup --shape tiny --workloads random --engines floor mtpc --repeats 1

Every sample is one process. *Cold* starts have no compiled code. *Warm* starts have only what cold
starts leave; mtpc's have an empty Inductor cache and no compiler on the path. Warm engines are
sampled in rounds. Files are in the page cache, so that disks play no part.

The floor imports torch and maps the weights, which every engine must do. The torch.compile row is
one compiled prefill without a decode step, so it prepares less than mtpc does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness import startup_child as child
from benchmarks.harness.machine import FamilyWatch
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Counts,
    Record,
    Table,
    new_record,
    sample_counts,
    write_results,
)
from benchmarks.harness.sampling import ATTEMPTS, Sampled, Tell
from mtpc.cli.demo import DEFAULT_PROMPT, demo_checkpoint
from mtpc.models.load import find_family

LONGEST_REASON = 160
"""The most characters of a failure in the table; JSON and logs have the whole text."""
PEERS = ("mtpc cold", "transformers eager", "torch.compile warm", "vLLM warm", "vLLM eager")
RATIOS = (
    ("mtpc warm", "floor"),
    ("mtpc warm", "floor and fresh memory"),
    *((peer, "mtpc warm") for peer in PEERS),
)
NOTES = (
    "best s, median s: from just before the process is started to its first token.",
    "python, import, load, token: medians of the stages that add up to it.",
    "vs floor: median over the floor's; mtpc's goal for warm starts is at most 2.",
    "floor and fresh memory: the floor, and as many bytes as the weights have written once.",
    "mtpc warm: with an empty Inductor cache, without a C++ compiler; all buckets are loaded.",
    "torch.compile: one prefill graph of this length, no decode step: less than mtpc prepares.",
    "cache MB: what a warm start is given; for mtpc kernels and all steps, weights are not in it.",
    SAMPLES_NOTE,
    "agree, disagree: in every token that they went on to decode.",
    "compiled again: a warm start of vLLM said that it could not load what a cold one had kept.",
)


@dataclass(frozen=True)
class Sample:
    """One start.

    Attributes:
        stages: seconds by stage; their sum is the time to the first token.
        foreign_share: share of the CPU time that other processes used meanwhile.
        cache_bytes: size of the engine's cache afterwards.
        scratch_bytes: bytes that it wrote to an empty scratch directory.
        report: the report of the process, with its tokens.
    """

    stages: dict[str, float]
    foreign_share: float
    cache_bytes: int
    scratch_bytes: int
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


@dataclass
class Case(Sampled[Sample]):
    """An engine on a checkpoint, its samples so far, and the failure that ended sampling."""

    workload: str
    directory: Path
    engine: child.Engine
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    def __str__(self) -> str:
        return f"{self.workload}, {self.engine.name}"


@dataclass(frozen=True)
class Row(Counts):
    """The figures of a case, from undisturbed samples if there are any; None if it never ran."""

    workload: str
    engine: str
    best_s: float | None
    median_s: float | None
    stages: dict[str, float]
    cache_bytes: int
    not_run: str | None


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a case."""
    kept = case.kept(max_foreign)
    seconds = [sample.seconds for sample in kept]
    return Row(
        workload=case.workload,
        engine=case.engine.name,
        best_s=min(seconds, default=None),
        median_s=median(seconds) if seconds else None,
        stages={s: median(sample.stages[s] for sample in kept) for s in child.STAGES if kept},
        cache_bytes=kept[-1].cache_bytes if kept else 0,
        not_run=case.failure,
        **case.counts(max_foreign),
    )


class Starter:
    """Starts processes and measures their times.

    Args:
        args: the command line.
        workdir: directory for caches, reports and logs.
    """

    def __init__(self, args: argparse.Namespace, workdir: Path) -> None:
        self.args, self.workdir = args, workdir.absolute()
        (workdir / "logs").mkdir(exist_ok=True)

    def start(self, case: Case) -> Sample:
        """Take one sample; a cold one first empties the cache.

        Raises:
            StartError: there was no first token.
        """
        cache = self.workdir / "caches" / case.workload / case.engine.kind
        scratch = self.workdir / "scratch"
        for path in (scratch, cache) if case.engine.state == "cold" else (scratch,):
            child.make_empty(path)
        args, engine, job = self.args, case.engine, self._job(case, cache)
        # Not resolved: a virtual environment's interpreter is a link, identified by its path.
        python = (args.vllm_python if engine.kind == "vllm" else Path(sys.executable)).absolute()
        variables = child.environment(engine, cache, scratch, torch.get_num_threads(), python)
        log = self.workdir / "logs" / f"{case.workload} {engine.name}.log"
        watch, begin = FamilyWatch(), time.monotonic()
        report = child.launch(python, job, variables, log, args.timeout)
        share = watch.foreign_share()
        report["compiled_again"] = child.COMPILED_AGAIN in log.read_text()
        reached = report.pop("moments")
        moments = pairwise([begin, *(reached[stage] for stage in child.STAGES)])
        stages = {s: end - start for s, (start, end) in zip(child.STAGES, moments, strict=True)}
        cached = child.size_of(cache) if engine.state else 0
        return Sample(stages, share, cached, child.size_of(scratch), report)

    def _job(self, case: Case, cache: Path) -> dict[str, Any]:
        """The job that the process gets."""
        args, engine = self.args, case.engine
        config = json.loads((case.directory / "config.json").read_text())
        family = find_family(config["architectures"])
        generator = torch.Generator().manual_seed(args.seed)
        ids = torch.randint(config["vocab_size"], (args.prompt_tokens,), generator=generator)
        options: dict[str, Any] = dict(
            spec_tokens=args.spec_tokens, batch_buckets=args.batch_buckets, max_len=args.max_len
        )
        if engine.kind == "mtpc":  # Frozen: what the cache lacks is an error, not a slow start.
            frozen = engine.state == "warm"
            options |= dict(cache_dir=str(cache), backend="cpu", frozen=frozen)
        return dict(
            kind=engine.kind,
            directory=str(case.directory.absolute()),
            prompt=DEFAULT_PROMPT if engine.is_text else ids.tolist(),
            new_tokens=args.new_tokens,
            steps=0,
            options=options,
            hf_class=family.hf_class,
            mtp_pattern=re.escape(family.layer_prefix(config["num_hidden_layers"], 0)),
            eager=not engine.state,
        )


def sample_in_turns(cases: Sequence[Case], starter: Starter, tell: Tell) -> None:
    """Take cold starts first, which fill the caches; then sample all other cases in rounds."""
    args = starter.args
    cold = [case for case in cases if case.engine.state == "cold"]
    others = [case for case in cases if case.engine.state != "cold"]
    for case in others:
        if not case.engine.state:  # Reads what has not been read since the machine's start.
            tell(f"not counted: {case}")
            _take(case, starter, tell)
            case.samples.clear()
    for _ in range(args.cold_repeats):
        for case in cold:
            _take(case, starter, tell)
    failed = {(case.workload, case.engine.kind) for case in cold if case.failure}
    for case in others:
        if case.engine.state == "warm" and (case.workload, case.engine.kind) in failed:
            case.failure = case.failure or "there is no cold start to be warm after"
    for _ in range(args.repeats * ATTEMPTS):
        for case in others:
            if len(case.undisturbed(args.max_foreign)) < args.repeats:
                _take(case, starter, tell)
        record = _record(cases, args)
        # After each round, so that an interrupt loses only the running round.
        write_results(args, record, table(record))


def _take(case: Case, starter: Starter, tell: Tell) -> None:
    """Take one more sample of a case, unless it has failed."""
    if case.failure is not None:
        return
    try:
        sample = starter.start(case)
    except child.StartError as error:
        case.failure = str(error)
        tell(f"{case}: {error}")
        return
    case.samples.append(sample)
    tell(f"{case}: {sample.seconds:.2f} s, {sample.foreign_share:.0%} of the CPU used by others")


def ratios(rows: Sequence[Row]) -> list[str]:
    """Lines that compare the rows of each workload, by medians and by best samples."""
    by_name = {(row.workload, row.engine): row for row in rows}
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        for name, other in RATIOS:
            above, below = by_name.get((workload, name)), by_name.get((workload, other))
            if above is None or below is None:
                continue
            text = "not measured"
            if above.median_s and above.best_s and below.median_s and below.best_s:
                best = above.best_s / below.best_s
                text = f"{above.median_s / below.median_s:.2f} (best: {best:.2f})"
            lines.append(f"{workload}: {name} / {other}: {text}")
    return lines


def same_tokens(cases: Sequence[Case]) -> dict[str, bool]:
    """Whether all starts, cold and warm, gave the same tokens, by workload and engine."""
    seen: dict[str, list[list[int]]] = {}
    for case in cases:
        for sample in case.samples:
            tokens = sample.report["continuation"]
            if tokens and not case.engine.is_text:
                seen.setdefault(f"{case.workload}, {case.engine.kind}", []).append(tokens)
    return {name: all(t == ts[0] for t in ts) for name, ts in seen.items() if len(ts) > 1}


def table(record: Record) -> Table:
    """A record's table."""
    rows = [
        Row(**{**row, "taken": tuple(Sample(**sample) for sample in row["taken"])})
        for row in record["rows"]
    ]
    same = [f"{n}: all starts {'dis' * (not s)}agree" for n, s in record["same_tokens"].items()]
    notes = [*record["ratios"], *same, *NOTES]
    return Table("From process start to first token", COLUMNS, cells(rows), notes)


COLUMNS = ("model", "start", "best s", "median s", "vs floor", *child.STAGES, "cache MB", "samples")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table."""
    floors = {row.workload: row.median_s for row in rows if row.engine == "floor"}
    return [[row.workload, row.engine, *_cells(row, floors.get(row.workload))] for row in rows]


def _cells(row: Row, floor: float | None) -> list[str]:
    failure = f"not run: {row.not_run}"[:LONGEST_REASON]
    if row.best_s is None or row.median_s is None:
        return [*"-" * (len(COLUMNS) - 3), failure]
    again = any(sample.report["compiled_again"] for sample in row.taken)
    return [
        f"{row.best_s:.2f}",
        f"{row.median_s:.2f}",
        f"{row.median_s / floor:.2f}x" if floor else "-",
        *(f"{row.stages[stage]:.2f}" for stage in child.STAGES),
        f"{row.cache_bytes / 1e6:.2f}" if row.cache_bytes else "-",
        f"{sample_counts(row)}{again * '; compiled again'}"
        + f"; then {failure}" * (row.not_run is not None),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if mtpc failed to start, or if warm and cold tokens differ."""
    args = parse(argv)
    tell = command.begin(args)
    with command.working_directory(args.workdir) as workdir:
        cases = [case for name in args.workloads for case in cases_of(name, args, workdir, tell)]
        sample_in_turns(cases, Starter(args, workdir), tell)
    table(_record(cases, args)).print()
    failed = any(case.failure for case in cases if case.engine.kind == "mtpc")
    alike = all(same for name, same in same_tokens(cases).items() if "mtpc" in name)
    return int(failed or not alike)


def cases_of(name: str, args: argparse.Namespace, workdir: Path, tell: Tell) -> list[Case]:
    """The cases of one checkpoint: every requested engine."""
    if name == "demo":
        directory = demo_checkpoint()
    else:
        name, directory = f"mimo-{args.shape}", workdir / f"mimo-{args.shape}"
        tell(f"write {directory}")
        write_checkpoint(directory, "mimo", SHAPES[args.shape], accepting=False, seed=args.seed)
    has_text = (directory / "tokenizer.json").is_file()
    engines = [e for e in child.ENGINES if e.kind in args.engines and (has_text or not e.is_text)]
    cases = [Case(name, directory, engine) for engine in engines]
    for case in cases:
        if case.engine.kind == "vllm" and args.vllm_python is None:
            case.failure = "no --vllm-python"
    return cases


def _record(cases: Sequence[Case], args: argparse.Namespace) -> Record:
    rows = [summarise(case, args.max_foreign) for case in cases]
    measured = {
        "ratios": ratios(rows),
        "same_tokens": same_tokens(cases),
        "rows": [asdict(row) for row in rows],
    }
    return new_record("startup", args, measured)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command.new_parser(
        "startup", __doc__, *command.FILES, "--shape", "--vllm-python", *command.SAMPLING,
        spec_tokens=3, batch_buckets=[1, 2, 4, 8], max_len=1024, prompt_tokens=32, new_tokens=8,
        repeats=5,
    )  # fmt: skip
    add, number = parser.add_argument, dict[str, Any](type=command.positive, metavar="N")
    add("--workloads", nargs="+", choices=("demo", "random"), default=["demo", "random"])
    add("--engines", nargs="+", choices=child.STARTS, default=list(child.STARTS))
    add("--cold-repeats", **number, default=1, help="samples, cold")
    add("--timeout", **number, default=900, help="seconds of one start")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
