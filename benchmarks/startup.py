"""Seconds from the start of a process to its first token, of mtpc, other engines and the floor.

    python -m benchmarks.startup                     # the demo model and the 0.5B shape
    python -m benchmarks.startup --vllm-python VENV/bin/python --repeats 5
    python -m benchmarks.startup --shape tiny --workloads random --engines floor mtpc --repeats 1

Every sample is one process. *Cold* starts have no compiled code. *Warm* starts have only what cold
starts leave; mtpc's have an empty Inductor cache and no compiler on the path. Warm engines are
sampled in rounds. Files are in the page cache, so that disks play no part.

The floor imports torch and maps the weights, which every engine must do.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness import startup_child as child
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.rounds import Case, SampleError
from benchmarks.harness.tables import SAMPLES, Column, Record, Row, TableForm, fields, over
from mtpc.cli.demo import DEFAULT_PROMPT, demo_checkpoint
from mtpc.models.load import find_family

LONGEST_REASON = 160
"""The most characters of a failure in the table; JSON and logs have the whole text."""
PEERS = ("mtpc cold", "transformers eager", "vLLM warm", "vLLM eager")
RATIOS = (
    ("mtpc warm", "floor"),
    ("mtpc warm", "floor and fresh memory"),
    *((peer, "mtpc warm") for peer in PEERS),
)


def start(name: str, directory: Path, engine: child.Engine, run: Run) -> Row:
    """Take one sample; a cold one first empties the cache.

    Args:
        name: of the checkpoint.
        directory: where it is.
        engine: what is started.
        run: has the command line, and the directory for caches, reports and logs.

    Returns:
        Seconds by stage, and their sum; the size of the cache afterwards; the bytes that were
        written to an empty scratch directory; the report of the process, with its tokens.

    Raises:
        SampleError: there was no first token.
    """
    workdir, args = run.workdir.absolute(), run.args
    cache, scratch, logs = (
        workdir / part for part in (f"caches/{name}/{engine.kind}", "scratch", "logs")
    )
    logs.mkdir(exist_ok=True)
    for path in (scratch, cache) if engine.state == "cold" else (scratch,):
        child.make_empty(path)
    if engine.kind == "vllm" and args.vllm_python is None:
        raise SampleError("no --vllm-python")
    # Not resolved: a virtual environment's interpreter is a link, identified by its path.
    python = (args.vllm_python if engine.kind == "vllm" else Path(sys.executable)).absolute()
    variables = child.environment(engine, cache, scratch, torch.get_num_threads(), python)
    log, begin = logs / f"{name} {engine.name}.log", time.monotonic()
    try:
        report = child.launch(python, _job(directory, engine, cache, args), variables, log)
    except child.StartError as error:
        raise SampleError(str(error)) from None
    report["compiled_again"] = child.COMPILED_AGAIN in log.read_text()
    reached = report.pop("moments")
    moments = pairwise([begin, *(reached[stage] for stage in child.STAGES)])
    stages = {s: end - start for s, (start, end) in zip(child.STAGES, moments, strict=True)}
    return dict(
        seconds=sum(stages.values()),
        stages=stages,
        cache_bytes=child.size_of(cache) if engine.state else 0,
        scratch_bytes=child.size_of(scratch),
        report=report,
    )


def _job(directory: Path, engine: child.Engine, cache: Path, args: Any) -> dict[str, Any]:
    """The job that the process gets."""
    config = json.loads((directory / "config.json").read_text())
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
        directory=str(directory.absolute()),
        prompt=DEFAULT_PROMPT if engine.is_text else ids.tolist(),
        new_tokens=args.new_tokens,
        steps=0,
        options=options,
        hf_class=family.hf_class,
        mtp_pattern=re.escape(family.layer_prefix(config["num_hidden_layers"], 0)),
        eager=not engine.state,
    )


def summary(samples: Sequence[Row]) -> Row:
    """The figures of a start; None if it never ran."""
    seconds = [sample["seconds"] for sample in samples]
    return dict(
        best_s=min(seconds, default=None),
        median_s=median(seconds) if seconds else None,
        stages={
            stage: median(sample["stages"][stage] for sample in samples)
            for stage in child.STAGES
            if samples
        },
        cache_bytes=samples[-1]["cache_bytes"] if samples else 0,
    )


def cases_of(name: str, run: Run) -> list[Case]:
    """The cases of one checkpoint: every requested engine."""
    args, directory = run.args, demo_checkpoint()
    if name != "demo":
        name, directory = f"mimo-{args.shape}", run.workdir / f"mimo-{args.shape}"
        run.tell(f"write {directory}")
        write_checkpoint(directory, "mimo", SHAPES[args.shape], accepting=False, seed=args.seed)
    has_text = (directory / "tokenizer.json").is_file()
    cases = []
    for engine in child.ENGINES:
        if engine.kind in args.engines and (has_text or not engine.is_text):
            take = partial(start, name, directory, engine, run)
            # What keeps no cache reads what has not been read since the machine's start.
            warm = None if engine.state else take
            cases.append(Case(dict(workload=name, engine=engine.name), take, warm, summary=summary))
    return cases


def engine_of(row: Row) -> child.Engine:
    """What a row is of."""
    return next(engine for engine in child.ENGINES if engine.name == row["engine"])


def measure(run: Run) -> Iterator[list[Row]]:
    """Cold starts first, which fill the caches; then all others in rounds."""
    args = run.args
    cases = [case for name in args.workloads for case in cases_of(name, run)]
    cold = [case for case in cases if engine_of(case.row).state == "cold"]
    for case in cold:
        case.attempt(run.tell)
    failed = {(case.row["workload"], engine_of(case.row).kind) for case in cold if case.failure}
    others = [case for case in cases if case not in cold]
    for case in others:
        engine = engine_of(case.row)
        if engine.state == "warm" and (case.row["workload"], engine.kind) in failed:
            case.failure = "there is no cold start to be warm after"
    run.sample(others)
    rows = [case.result(args.max_foreign) for case in cases]
    same = same_tokens(rows)
    run.facts |= {"ratios": ratios(rows), "same_tokens": same}
    mtpc_failed = any("not_run" in row for row in rows if engine_of(row).kind == "mtpc")
    run.failed = mtpc_failed or not all(s for name, s in same.items() if "mtpc" in name)
    yield rows


def ratios(rows: Sequence[Row]) -> list[str]:
    """Lines that compare the rows of each workload, by medians and by best samples."""
    by_name = {(row["workload"], row["engine"]): row for row in rows}
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for name, other in RATIOS:
            above, below = by_name.get((workload, name)), by_name.get((workload, other))
            if above is None or below is None:
                continue
            text = "not measured"
            if above["median_s"] and below["median_s"]:
                best = above["best_s"] / below["best_s"]
                text = f"{above['median_s'] / below['median_s']:.2f} (best: {best:.2f})"
            lines.append(f"{workload}: {name} / {other}: {text}")
    return lines


def same_tokens(rows: Sequence[Row]) -> dict[str, bool]:
    """Whether all starts, cold and warm, gave the same tokens, by workload and engine."""
    seen: dict[str, list[list[int]]] = {}
    for row in rows:
        for sample in row["taken"]:
            tokens, engine = sample["report"]["continuation"], engine_of(row)
            if tokens and not engine.is_text:
                seen.setdefault(f"{row['workload']}, {engine.kind}", []).append(tokens)
    return {name: all(t == ts[0] for t in ts) for name, ts in seen.items() if len(ts) > 1}


def _notes(record: Record) -> list[str]:
    alike = record.get("same_tokens", {}).items()  # A run that ended early has none.
    same = [f"{name}: all starts {'dis' * (not are)}agree" for name, are in alike]
    return [*record.get("ratios", ()), *same, *NOTES]


def _samples(row: Row, rows: Sequence[Row]) -> str:
    failure = f"not run: {row.get('not_run')}"[:LONGEST_REASON]
    if row["median_s"] is None:
        return failure
    again = any(sample["report"]["compiled_again"] for sample in row["taken"])
    then = f"; then {failure}" * (row.get("not_run") is not None)
    return f"{SAMPLES.cell(row, rows)}{again * '; compiled again'}{then}"


def _over_floor(row: Row, rows: Sequence[Row]) -> float | None:
    ratio = over("median_s", ("workload",), engine="floor")
    return ratio(row, rows) if row["median_s"] else None


def _stage(name: str, row: Row, rows: Sequence[Row]) -> float | None:
    found: float | None = row["stages"].get(name)
    return found


NOTES = (
    "python, import, load, token: medians of the stages that add up to the median.",
    "floor and fresh memory: the floor, and as many bytes as the weights have written once.",
    "mtpc warm: with an empty Inductor cache, without a C++ compiler; all buckets are loaded.",
    "agree, disagree: in every token that they went on to decode.",
    "compiled again: a warm start of vLLM said that it could not load what a cold one had kept.",
)
FORM = TableForm(
    "From process start to first token",
    (
        *fields("model=workload, start=engine, best s=best_s:.2f"),
        Column(
            "median s", "median_s", ".2f",
            "from just before the process is started to its first token.",
        ),
        Column(
            "vs floor", _over_floor, ".2fx",
            "median over the floor's; mtpc's goal for warm starts is at most 2.",
        ),
        *(Column(stage, partial(_stage, stage), ".2f") for stage in child.STAGES),
        Column(
            "cache MB", lambda row, _: row["cache_bytes"] or None, ".2f",
            "what a warm start is given; for mtpc kernels and all steps, weights are not in it.",
            1e-6,
        ),
        Column("samples", _samples, "", SAMPLES.note),
    ),
    _notes,
)  # fmt: skip
BENCHMARK = Benchmark(
    "startup",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--vllm-python", *command.SAMPLING),
    dict(
        spec_tokens=3, batch_buckets=[1, 2, 4, 8], max_len=1024, prompt_tokens=32, new_tokens=8,
        repeats=5,
    ),
    {
        "--workloads": dict(nargs="+", choices=("demo", "random"), default=["demo", "random"]),
        "--engines": dict(nargs="+", choices=child.STARTS, default=list(child.STARTS)),
    },
)  # fmt: skip
main, table = BENCHMARK.commands(__name__)
