"""Compares two ranks of one thread with one rank of two: time, collectives, messages, memory.

    python -m benchmarks.ranks                          # the 0.5B shape, K = 0 and 3, batch 1 and 8
    python -m benchmarks.ranks --shape tiny --ranks 4 --repeats 1

Each sample is a new group of processes. One rank with all threads and several ranks with their
share are sampled in rounds. Ranks form a gloo process group on this machine, and exchange values
within a step through shared memory. After the timed steps the same prompts are decoded again under
torch's profiler, which gives the share of a step in collectives.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import mtpc
from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.machine import field_bytes
from benchmarks.harness.results import Columns, Record, Table, publish
from benchmarks.memory import planned_bytes
from mtpc.program.follow import LeadingProgram
from mtpc.program.program import Program

MIB = 2**20
COLLECTIVES = ("all_reduce", "all_gather", "vocab_embedding", "vocab_max", "first_rank")
COLUMNS: Columns[dict[str, Any]] = {
    "K": lambda row: str(row["spec_tokens"]),
    "batch": lambda row: str(row["batch"]),
    "ranks": lambda row: str(row["ranks"]),
    "threads each": lambda row: str(row["threads"]),
    "ms a step": lambda row: f"{row['ms_per_step']:.2f}",
    "collectives ms": lambda row: _of_several(row, f"{row['collective_ms']:.2f}"),
    "of a step": lambda row: _of_several(row, f"{row['collective_ms'] / row['profiled_ms']:.0%}"),
    "calls a step": lambda row: _of_several(row, f"{row['collective_calls']:.0f}"),
    "bytes sent a step": lambda row: _of_several(row, f"{row['bytes_per_step']:.0f}"),
    "in idle steps": lambda row: _of_several(row, f"{row['idle_bytes']:.0f}"),
    "resident MiB a rank": lambda row: f"{row['resident_bytes'] / MIB:.0f}",
    "weights and pool MiB": lambda row: f"{row['held_bytes'] / MIB:.0f}",
    "samples": lambda row: str(row["samples"]),
}
NOTES = (
    "ms a step: of decode steps, rank 0's, medians of samples.",
    "collectives ms: mean time of rank 0 in collectives, waiting for the others included, under the"
    " profiler; of a step: of a profiled step.",
    "bytes sent a step: rank 0's messages to another rank; in idle steps, in which the host writes"
    " nothing: the step's number alone, in 256 bytes.",
    "resident: growth of a process since its imports, after decoding; of the largest rank.",
    "weights and pool: bytes of the weights that a rank's steps are bound to, and of its buffers.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    if args.child:
        _child(json.loads(args.child))
        return 0
    tell = command.teller()
    samples: list[dict[str, Any]] = []
    with command.working_directory(args.workdir) as workdir:
        command.write_mimo(args, workdir, tell, accepting=True)
        for turn in range(1, args.repeats + 1):
            for k, batch in ((k, batch) for k in args.spec_tokens for batch in args.batches):
                for ranks in (1, args.ranks):
                    tell(f"round {turn}: K={k}, batch {batch}, {ranks} rank(s)")
                    samples.append(_sample(workdir.absolute(), args, k, batch, ranks))
    publish("ranks", args, {"rows": [*_rows(samples)]}, table)
    return 0


def table(record: Record) -> Table:
    """A record's table."""
    return Table.of("Ranks", COLUMNS, record["rows"], NOTES)


def _of_several(row: dict[str, Any], cell: str) -> str:
    return "-" if row["ranks"] == 1 else cell


def _sample(
    workdir: Path, args: argparse.Namespace, spec_tokens: int, batch: int, ranks: int
) -> dict[str, Any]:
    """Run one group of processes; returns the report of its rank 0."""
    job = {
        "directory": str(workdir / "accepting"),
        "size": ranks,
        "threads": args.threads // ranks,
        "new_tokens": args.new_tokens,
        "prompt_tokens": args.prompt_tokens,
        "options": {
            "cache_dir": str(workdir / "cache"),
            "spec_tokens": spec_tokens,
            "batch_buckets": [batch],
            "max_len": command.max_len(args),
            "backend": "cpu",
            "tensor_parallel_size": ranks,
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.ranks", "--child"),
                    json.dumps({**job, "rank": rank, "store": f"{directory}/store"}),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{ranks} rank(s) ended with {[p.returncode for p in processes]}")
    rows = [json.loads(text.splitlines()[-1]) for text in said]
    largest = {name: max(row[name] for row in rows) for name in ("resident_bytes", "held_bytes")}
    return {**rows[0], **largest, "spec_tokens": spec_tokens, "batch": batch, "ranks": ranks,
            "threads": args.threads // ranks}  # fmt: skip


def _child(job: dict[str, Any]) -> None:
    """Run one rank: decode, and print the report."""
    torch.set_num_threads(job["threads"])
    if job["size"] > 1:
        place = {"rank": job["rank"], "world_size": job["size"]}
        dist.init_process_group("gloo", init_method=f"file://{job['store']}", **place)
    compile_model = mtpc.compile
    before = field_bytes("/proc/self/status", "VmRSS") or 0
    model = compile_model(job["directory"], **job["options"])
    figures: dict[str, float] = {}
    if job["rank"]:
        model.follow()
    else:
        figures = _decode(model, job)
        model.close()
    resident = (field_bytes("/proc/self/status", "VmRSS") or 0) - before
    held = planned_bytes(job["directory"], job["options"], job["rank"])
    figures |= {"resident_bytes": resident, "held_bytes": held}
    print(json.dumps(figures))
    if job["size"] > 1:
        dist.destroy_process_group()


def _decode(model: mtpc.SpecModel, job: dict[str, Any]) -> dict[str, float]:
    """Timed steps, then profiled ones."""
    stats = model.stats
    _run(_steps(model, job))
    before = stats.decode_counts()
    told = [told for told in _steps(model, job) if told is not None]
    timed = stats.decode_counts() - before
    idle = [size for size, writes in told if not writes]
    steps, first = _steps(model, job), stats.decode_steps
    while stats.decode_steps == first:
        next(steps)
    before = stats.decode_counts()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _run(steps)
    profiled = stats.decode_counts() - before
    names = {f"{space}::{name}" for space in ("mtpc", "mtpc_cpu") for name in COLLECTIVES}
    calls = [e for e in profile.events() if e.name in names and not _is_inside(e, names)]
    return {
        "ms_per_step": 1e3 * timed.seconds / timed.steps,
        "bytes_per_step": sum(size for size, _ in told) / max(1, len(told)),
        "idle_bytes": sum(idle) / max(1, len(idle)),
        "collective_ms": 1e-3 * sum(call.cpu_time_total for call in calls) / profiled.steps,
        "collective_calls": len(calls) / profiled.steps,
        "profiled_ms": 1e3 * profiled.seconds / profiled.steps,
    }


def _steps(model: mtpc.SpecModel, job: dict[str, Any]) -> Iterator[tuple[int, int] | None]:
    """Run the prompts; after each step, of a decode step, the bytes that rank 0 sent and the
    buffers that the host wrote."""
    program, stats = model.program, model.stats
    for i in range(job["options"]["batch_buckets"][0]):
        prompt = [2 + (7 * i + j) % 90 for j in range(job["prompt_tokens"])]
        model.engine.add(prompt, job["new_tokens"])
    while model.engine.has_work:
        before = _sent(program), program.host_writes, stats.decode_steps
        model.engine.step()
        told = _sent(program) - before[0], program.host_writes - before[1]
        yield told if stats.decode_steps > before[2] else None


def _run(steps: Iterator[Any]) -> None:
    for _ in steps:
        pass


def _sent(program: Program) -> int:
    return program.sent_bytes if isinstance(program, LeadingProgram) else 0


def _is_inside(event: Any, names: set[str]) -> bool:
    """Whether an event is inside another collective."""
    while (event := event.cpu_parent) is not None:
        if event.name in names:
            return True
    return False


def _rows(samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for each K, batch and number of ranks: medians of its samples."""
    names = ("spec_tokens", "batch", "ranks", "threads")
    for place in dict.fromkeys(tuple(sample[name] for name in names) for sample in samples):
        own = [s for s in samples if tuple(s[name] for name in names) == place]
        figures = {n: median(s[n] for s in own) for n in own[0] if n not in names}
        yield {**dict(zip(names, place, strict=True)), **figures, "samples": len(own)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "ranks", __doc__, *command.FILES, "--shape", "--child", threads=2, spec_tokens=[0, 3],
        batches=[1, 8], prompt_tokens=32, new_tokens=64, repeats=3,
    )  # fmt: skip
    help_ = "how many beside one, which share the threads"
    parser.add_argument("--ranks", type=command.positive, default=2, metavar="N", help=help_)
    args = parser.parse_args(argv)
    if args.threads % args.ranks or args.ranks < 2:
        parser.error(f"{args.threads} threads for {args.ranks} ranks; expected an equal share each")
    return args


if __name__ == "__main__":
    sys.exit(main())
