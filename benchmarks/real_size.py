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

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.large import write_codes
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import weigh
from benchmarks.harness.results import Record, Table, publish
from benchmarks.harness.startup_child import start_here
from benchmarks.memory import LARGE
from mtpc.models.families.mimo import MIMO
from mtpc.weights import packing

GIB = 2**30
READ_BYTES = 1 << 24
"""Bytes of a file per read."""
_PIECE_BYTES = 1 << 26
"""Bytes of new memory at a time, about one large weight."""
COLUMNS = (
    "K", "start", "first token s", "reading s", "new memory s", "beyond both", "peak GiB",
    "ms/step", "GB/s", "limit ms", "of the memory limit",
)  # fmt: skip
NOTES = (
    "first token: from the start of the process; a prompt of 32 tokens.",
    "cold: with an empty cache, so that kernels are compiled, too.",
    "reading: all weight files are read once from the disk, just before a warm start.",
    "new memory: as many bytes of new memory are written once by all threads, in a process of its"
    " own; packed weights need as much. beyond both: beyond the longer of the two.",
    "peak: most that was resident in the process at any moment, mapped weights included.",
    "ms/step: median of decode steps at batch 1; limit: reading a step's weights at the bandwidth"
    " before and after the process.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    if args.touch:
        print(_write_new(args.touch))
        return 0
    tell, rows = command.teller(), list[dict[str, Any]]()
    with command.working_directory(args.workdir) as workdir:
        directory = workdir.absolute() / args.shape
        if not (directory / "config.json").is_file():
            tell(f"write {directory}")
            write_codes(directory, LARGE[args.shape], None)
        checkpoint = weigh(directory, MIMO)
        for k in args.spec_tokens:
            for kind in ("cold", "warm"):
                reading = _read(directory) if kind == "warm" else None
                _forget(directory)
                tell(f"K={k}, {kind}; read in {reading}")
                before = BandwidthProbe().read()  # In huge pages, as long as memory is free.
                row = start(directory, workdir.absolute() / f"cache-{k}", k, args.steps)
                # Memory last: before, it would make reading faster and a start slower.
                touching = _touch(directory) if kind == "warm" else None
                row["bandwidths"] = [before, BandwidthProbe().read()]
                row["step_bytes"] = checkpoint.step_bytes(k)
                rows.append(
                    {"k": k, "start": kind, "reading_s": reading, "touching_s": touching, **row}
                )
                tell(str(_cells(rows[-1])))
    publish("real_size", args, {"rows": rows}, table)
    return 0


def table(record: Record) -> Table:
    """A record's table."""
    title = f"Of {record['arguments']['shape']} size, bfloat16"
    return Table(title, COLUMNS, [_cells(row) for row in record["rows"]], NOTES)


def _cells(row: dict[str, Any]) -> list[str]:
    reading, touching, first = row["reading_s"], row["touching_s"], row["first_token_s"]
    ms, bandwidth = median(row["step_ms"]), median(row["bandwidths"])
    limit = 1e3 * row["step_bytes"] / bandwidth
    return [
        str(row["k"]),
        row["start"],
        f"{first:.1f}",
        "-" if reading is None else f"{reading:.1f}",
        "-" if touching is None else f"{touching:.1f}",
        "-" if reading is None else f"{first - max(reading, touching):.1f}",
        f"{row['peak_bytes'] / GIB:.1f}",
        f"{ms:.1f}",
        f"{bandwidth / 1e9:.1f}",
        f"{limit:.1f}",
        f"{limit / ms:.0%}",
    ]


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
    line = [sys.executable, "-m", "benchmarks.real_size", "--touch", str(nbytes)]
    return float(subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)


def _write_new(nbytes: int) -> float:
    """Seconds in which torch's threads write once to this much new memory, in huge pages."""
    begin, kept = time.perf_counter(), []
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("real_size", __doc__, *command.FILES, spec_tokens=[0, 1, 3])
    add = parser.add_argument
    add("--shape", choices=LARGE, default="7b", help="sizes of the model")
    add("--steps", type=command.positive, default=24, metavar="N", help="decode steps to time")
    add("--touch", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
