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
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run, read_report
from benchmarks.harness.machine import field_bytes
from benchmarks.harness.rounds import Case
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields
from benchmarks.memory import planned_bytes
from mtpc.program.follow import LeadingProgram
from mtpc.program.program import Program

MIB = 2**20
COLLECTIVES = ("all_reduce", "all_gather", "vocab_embedding", "vocab_max", "first_rank")


def measure(run: Run) -> Iterator[list[Row]]:
    """One rank and several, in rounds, for each K and batch."""
    args, cases = run.args, list[Case]()
    run.write_mimo(accepting=True)
    for k, batch, ranks in product(args.spec_tokens, args.batches, (1, args.ranks)):
        row = dict(spec_tokens=k, batch=batch, ranks=ranks, threads=args.threads // ranks)
        cases.append(Case(row, partial(_sample, run, k, batch, ranks)))
    yield run.sample(cases)


def _sample(run: Run, spec_tokens: int, batch: int, ranks: int) -> Row:
    """Run one group of processes; returns the report of its rank 0."""
    args, workdir = run.args, run.workdir.absolute()
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
            "max_len": run.max_len,
            "backend": "cpu",
            "tensor_parallel_size": ranks,
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        start = BENCHMARK.start_child
        processes = [start({**job, "rank": rank, "store": store}) for rank in range(ranks)]
        try:
            rows = [read_report(process, "a rank") for process in processes]
        finally:
            for process in processes:
                process.kill()
    largest = {name: max(row[name] for row in rows) for name in ("resident_bytes", "held_bytes")}
    return {**rows[0], **largest}


def _child(job: dict[str, Any]) -> dict[str, float]:
    """Run one rank: decode, and report."""
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
    if job["size"] > 1:
        dist.destroy_process_group()
    return figures


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


def _of_several(name: str, row: Row, rows: Sequence[Row]) -> float | None:
    """A figure of several ranks: one has no collectives."""
    found: float | None = None if row["ranks"] == 1 else row[name]
    return found


def _of_step(row: Row, rows: Sequence[Row]) -> float | None:
    return None if row["ranks"] == 1 else row["collective_ms"] / row["profiled_ms"]


def _samples(row: Row, rows: Sequence[Row]) -> str:
    """Older records count no disturbed ones."""
    return SAMPLES.cell(row, rows) if "discarded" in row else str(row["samples"])


FORM = TableForm(
    "Ranks",
    (
        *fields("K=spec_tokens, batch, ranks, threads each=threads"),
        Column("ms a step", "ms_per_step", ".2f", "of decode steps, rank 0's, medians of samples."),
        Column(
            "collectives ms", partial(_of_several, "collective_ms"), ".2f",
            "mean time of rank 0 in collectives, waiting for the others included, under the "
            "profiler.",
        ),
        Column("of a step", _of_step, ".0%", "of a profiled step."),
        Column("calls a step", partial(_of_several, "collective_calls"), ".0f"),
        Column(
            "bytes sent a step", partial(_of_several, "bytes_per_step"), ".0f",
            "rank 0's messages to another rank.",
        ),
        Column(
            "in idle steps", partial(_of_several, "idle_bytes"), ".0f",
            "in which the host writes nothing: the step's number alone, in 256 bytes.",
        ),
        Column(
            "resident MiB a rank", "resident_bytes", ".0f",
            "growth of a process since its imports, after decoding; of the largest rank.", 1 / MIB,
        ),
        Column(
            "weights and pool MiB", "held_bytes", ".0f",
            "bytes of the weights that a rank's steps are bound to, and of its buffers.", 1 / MIB,
        ),
        Column("samples", _samples),
    ),
)  # fmt: skip


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.threads % args.ranks or args.ranks < 2:
        parser.error(f"{args.threads} threads for {args.ranks} ranks; expected an equal share each")


BENCHMARK = Benchmark(
    "ranks",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--max-foreign"),
    dict(threads=2, spec_tokens=[0, 3], batches=[1, 8], prompt_tokens=32, new_tokens=64, repeats=3),
    {
        "--ranks": command.NUMBER
        | dict(default=2, help="how many beside one, which share the threads")
    },
    _check,
    _child,
)
main, table = BENCHMARK.commands(__name__)
