"""MiMo-7B's sizes in bfloat16 on this machine: memory, time to the first token, time per step.

    python -m benchmarks.real_size --workdir DIR        # 15.7 GB of weights are written there
    python -m benchmarks.real_size --shape tiny --spec-tokens 0 1

Weights are random. For each K two processes run, one after the other. The first one compiles
kernels and builds its steps in an empty cache; the second one uses them. Before the second one
starts, the weights are dropped from the page cache, so that it reads them from the disk. Just
before, reading the files alone is timed in the same way. Just after, writing once to as much new
memory is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run, read_report
from benchmarks.harness.large import write_codes
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import weigh
from benchmarks.harness.startup_child import start_here
from benchmarks.harness.tables import Column, Record, Row, TableForm
from benchmarks.memory import LARGE
from mtpc.models.families.mimo import MIMO
from mtpc.weights import packing

GIB = 2**30
READ_BYTES = 1 << 24
"""Bytes of a file per read."""
_PIECE_BYTES = 1 << 26
"""Bytes of new memory at a time, about one large weight."""


def measure(run: Run) -> Iterator[list[Row]]:
    """A cold and a warm start for each K."""
    directory = run.workdir.absolute() / run.args.shape
    if not (directory / "config.json").is_file():
        run.tell(f"write {directory}")
        write_codes(directory, LARGE[run.args.shape], None)
    checkpoint = weigh(directory, MIMO)
    for k in run.args.spec_tokens:
        for kind in ("cold", "warm"):
            reading = _read(directory) if kind == "warm" else None
            _forget(directory)
            run.tell(f"K={k}, {kind}; read in {reading}")
            before = BandwidthProbe().read()  # In huge pages, as long as memory is free.
            cache = run.workdir.absolute() / f"cache-{k}"
            row = {"k": k, "start": kind, **start(directory, cache, k, run.args.steps)}
            # Memory last: before, it would make reading faster and a start slower.
            touching = _touch(directory) if kind == "warm" else None
            row["bandwidths"] = [before, BandwidthProbe().read()]
            row["step_bytes"] = checkpoint.step_bytes(k)
            yield [{**row, "reading_s": reading, "touching_s": touching}]


def _rows(record: Record) -> list[Row]:
    return [{**row, **_figures(row)} for row in record["rows"]]


def _figures(row: Row) -> Row:
    reading, ms, bandwidth = row["reading_s"], median(row["step_ms"]), median(row["bandwidths"])
    longer = None if reading is None else max(reading, row["touching_s"])
    limit = 1e3 * row["step_bytes"] / bandwidth
    beyond = None if longer is None else row["first_token_s"] - longer
    return dict(ms=ms, bandwidth=bandwidth, limit=limit, of_limit=limit / ms, beyond=beyond)


FORM = TableForm(
    "Of {shape} size, bfloat16",
    (
        Column("K", "k"),
        Column(
            "start", "start", "", "cold: with an empty cache, so that kernels are compiled, too."
        ),
        Column(
            "first token s", "first_token_s", ".1f",
            "from the start of the process; a prompt of 32 tokens.",
        ),
        Column(
            "reading s", "reading_s", ".1f",
            "all weight files are read once from the disk, just before a warm start.",
        ),
        Column(
            "new memory s", "touching_s", ".1f",
            "as many bytes of new memory are written once by all threads, in a process of its own; "
            "packed weights need as much.",
        ),
        Column("beyond both", "beyond", ".1f", "beyond the longer of the two."),
        Column(
            "peak GiB", "peak_bytes", ".1f",
            "most that was resident in the process at any moment, mapped weights included.",
            1 / GIB,
        ),
        Column("ms/step", "ms", ".1f", "median of decode steps at batch 1."),
        Column("GB/s", "bandwidth", ".1f", factor=1e-9),
        Column(
            "limit ms", "limit", ".1f",
            "reading a step's weights at the bandwidth before and after the process.",
        ),
        Column("of the memory limit", "of_limit", ".0%"),
    ),
    rows=_rows,
)  # fmt: skip


def _forget(directory: Path) -> None:
    """Drop the weights from the page cache; no process has them mapped."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(directory: Path) -> float:
    """Seconds that reading the weights from the disk takes."""
    _forget(directory)
    buffer, begin = bytearray(READ_BYTES), time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def _touch(directory: Path) -> float:
    """Seconds in which a process writes to as much new memory as the weights have."""
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return float(read_report(BENCHMARK.start_child({"bytes": nbytes}), "writing to new memory"))


def _write_new(job: dict[str, Any]) -> float:
    """Seconds in which torch's threads write once to this much new memory, in huge pages."""
    begin, kept, nbytes = time.perf_counter(), [], job["bytes"]
    for start in range(0, nbytes, _PIECE_BYTES):
        kept.append(packing.allocate((min(_PIECE_BYTES, nbytes - start),), torch.uint8).zero_())
    return time.perf_counter() - begin


def start(
    checkpoint: Path, cache: Path, k: int, steps: int, prompt: str | None = None
) -> dict[str, Any]:
    """Start a process, generate a token and time steps; `first_token_s` is from its beginning."""
    job: dict[str, Any] = {"options": {"spec_tokens": k, "max_len": 1024}, "steps": steps}
    job |= {} if prompt is None else {"prompt": prompt}
    report = start_here(checkpoint, cache, cache.with_suffix(".log"), **job)
    return {name: report[name] for name in ("first_token_s", "peak_bytes", "step_ms")}


BENCHMARK = Benchmark(
    "real_size",
    __doc__,
    measure,
    FORM.of,
    command.FILES,
    dict(spec_tokens=[0, 1, 3]),
    {
        "--shape": dict(choices=LARGE, default="7b", help="sizes of the model"),
        "--steps": command.NUMBER | dict(default=24, help="decode steps to time"),
    },
    child=_write_new,
)
main, table = BENCHMARK.commands(__name__)
