"""Resident memory of a compiled model, compared with its weights, KV pool and buffers.

    python -m benchmarks.memory                    # the 0.5B shape: just compiled, and warm
    python -m benchmarks.memory --shape 7b --quantize int4-g32 --spec-tokens 1 --batch-buckets 1

Every row is one process (`harness.startup_child`). "Resident" is its growth from the end of its
imports until it has decoded. The peak is counted from there, too, so that the row of a process that
compiles shows the memory of compilation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.large import MIMO_7B, write_codes
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.results import Columns, Record, Table, publish
from benchmarks.harness.startup_child import start_here
from mtpc import CompileOptions
from mtpc.layout import graph_keys
from mtpc.program.open_cache import open_cache, plan_model
from mtpc.program.program import need_of_steps
from mtpc.ranks.group import all_parts
from mtpc.weights.quantise import SCHEMES

MIB = 2**20
LARGE = {**SHAPES, "7b": MIMO_7B}
COLUMNS: Columns[dict[str, Any]] = {
    "start": lambda row: row["start"],
    "weights MiB": lambda row: f"{row['weights_bytes'] / MIB:.0f}",
    "pool and buffers MiB": lambda row: f"{row['state_bytes'] / MIB:.0f}",
    "resident MiB": lambda row: f"{row['resident_bytes'] / MIB:.0f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / MIB:.0f}",
    # Older records do not have it.
    "planned MiB": lambda r: f"{r['planned_bytes'] / MIB:.0f}" if "planned_bytes" in r else "-",
    "resident over planned": lambda row: (
        f"{row['resident_bytes'] / row['planned_bytes']:.2f}" if "planned_bytes" in row else "-"
    ),
}
NOTES = (
    "weights: the checkpoint's tensors; resident: growth since the imports, after decoding.",
    "planned: packed weights, pool and buffers, as mtpc counts them before it binds a step; weights"
    " that are read as stored stay in their files.",
    "ratio: resident over weights, pool and buffers; the goal is at most 1.08, of both ratios.",
    "peak: most that was resident at any moment, less what was after the imports; of a warm start,"
    " that is packing.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    tell = command.teller()
    names = ("spec_tokens", "batch_buckets", "max_len")
    options = {name: getattr(args, name) for name in names}
    with command.working_directory(args.workdir) as workdir:
        tell(f"write {workdir / 'mimo'}")
        _write(workdir / "mimo", args)
        rows = []
        for start in ("just compiled", "warm"):
            tell(start)
            rows.append({"start": start, **_measure(workdir.absolute(), options)})
    publish("memory", args, {"rows": rows}, table)
    return 0


def _write(directory: Path, args: argparse.Namespace) -> None:
    """Write the checkpoint, unless it exists: a large one takes minutes."""
    if args.quantize is None and args.shape in SHAPES:
        write_checkpoint(directory, "mimo", SHAPES[args.shape], accepting=False)
    elif not (directory / "config.json").is_file():
        write_codes(directory, LARGE[args.shape], args.quantize)


def table(record: Record) -> Table:
    """A record's table."""
    return Table.of("Memory", COLUMNS, record["rows"], NOTES)


def _measure(workdir: Path, options: dict[str, Any]) -> dict[str, float]:
    directory, cache = workdir / "mimo", workdir / "cache"
    found = start_here(directory, cache, workdir / "start.log", options=options, new_tokens=16)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    resident = found["resident_bytes"] - found["imports_bytes"]
    return dict(
        weights_bytes=weights,
        state_bytes=found["state_bytes"],
        planned_bytes=planned_bytes(
            str(directory), {**options, "cache_dir": str(cache), "backend": "cpu"}
        ),
        resident_bytes=resident,
        ratio=resident / (weights + found["state_bytes"]),
        peak_bytes=found["peak_bytes"] - found["imports_bytes"],
    )


def planned_bytes(directory: str, options: dict[str, Any], rank: int = 0) -> int:
    """The memory that mtpc plans for a rank's steps in the cache: weights and buffers."""
    source, plan = plan_model(directory, CompileOptions.parse(options))
    part = all_parts(options.get("tensor_parallel_size", 1))[rank]
    cache = open_cache(source, plan, lambda line: None, part)
    steps = cache.find_all(graph_keys(plan, "fused")) if cache else None
    assert steps is not None
    need = need_of_steps(steps, next(iter(steps.values())).plan, owns_buffers=True)
    return need.weights + need.buffers


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = dict[str, Any](spec_tokens=3, batch_buckets=[1, 8], max_len=1024)
    parser = command.new_parser("memory", __doc__, *command.FILES, **defaults)
    add = parser.add_argument
    add("--shape", choices=LARGE, default="0.5b", help="sizes of the model")
    codes = [name for name, scheme in SCHEMES.items() if scheme.kind == "int4"]
    add("--quantize", choices=codes, metavar="SCHEME", help="random codes of a scheme, not weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
