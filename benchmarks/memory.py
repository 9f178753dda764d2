"""Resident memory of a compiled model, compared with its weights, KV pool and buffers.

    python -m benchmarks.memory                    # the 0.5B shape: just compiled, and warm
    python -m benchmarks.memory --shape 7b --quantize int4-g32 --spec-tokens 1 --batch-buckets 1

Every row is one process. "Resident" is its growth from the end of its imports until it has decoded.
The peak is counted from there, too, so that the row of a process that compiles shows the memory of
compilation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.codes import MIMO_7B, write_codes
from benchmarks.harness.machine import field_bytes
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.results import Record, Table, publish
from mtpc.weights.quantise import SCHEMES

MIB = 2**20
LARGE = {**SHAPES, "7b": MIMO_7B}
COLUMNS = ("start", "weights MiB", "pool and buffers MiB", "resident MiB", "ratio", "peak MiB",
           "planned MiB", "resident over planned")  # fmt: skip
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
    if args.child:
        print(json.dumps(_grow(json.loads(args.child))))
        return 0
    tell = command.teller()
    with command.working_directory(args.workdir) as workdir:
        tell(f"write {workdir / 'mimo'}")
        _write(workdir / "mimo", args)
        job = {
            "directory": str(workdir.absolute() / "mimo"),
            "cache": str(workdir.absolute() / "cache"),
            "options": {
                "spec_tokens": args.spec_tokens,
                "batch_buckets": args.batch_buckets,
                "max_len": args.max_len,
            },
        }
        rows = []
        for start in ("just compiled", "warm"):
            tell(start)
            rows.append({"start": start, **_measure(job)})
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
    return Table("Memory", COLUMNS, [_cells(row) for row in record["rows"]], NOTES)


def _measure(job: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _grow(job: dict[str, Any]) -> dict[str, float]:
    """Compile or start warm in this process, and return its memory."""
    import torch  # noqa: F401

    import mtpc

    compile_model = mtpc.compile
    before = _status("VmRSS")
    where = {"cache_dir": job["cache"], "backend": "cpu"}
    model = compile_model(job["directory"], **where, **job["options"])
    model.generate(list(range(2, 34)), 16, ignore_eos=True)
    program = model.program
    tensors = [*program.shared.values(), *(t for s in program.steps.values() for t in
                                           s.buffers.values())]  # fmt: skip
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    weights = sum(f.stat().st_size for f in Path(job["directory"]).glob("*.safetensors"))
    state, resident = sum(storages.values()), _status("VmRSS") - before
    return dict(
        weights_bytes=weights,
        state_bytes=state,
        planned_bytes=planned_bytes(job["directory"], {**job["options"], **where}),
        resident_bytes=resident,
        ratio=resident / (weights + state),
        peak_bytes=_status("VmHWM") - before,
    )


def planned_bytes(directory: str, options: dict[str, Any], rank: int = 0) -> int:
    """The memory that mtpc plans for a rank's steps in the cache: weights and buffers."""
    from mtpc import CompileOptions
    from mtpc.layout import graph_keys
    from mtpc.program.open_cache import open_cache, plan_model
    from mtpc.program.program import need_of_steps
    from mtpc.program.ranks import all_parts

    source, plan = plan_model(directory, CompileOptions.parse(options))
    part = all_parts(options.get("tensor_parallel_size", 1))[rank]
    cache = open_cache(source, plan, lambda line: None, part)
    steps = cache.find_all(graph_keys(plan, "fused")) if cache else None
    assert steps is not None
    need = need_of_steps(steps, next(iter(steps.values())).plan, owns_buffers=True)
    return need.weights + need.buffers


def _status(field: str) -> int:
    """Bytes of this process, from /proc/self/status."""
    found = field_bytes("/proc/self/status", field)
    assert found is not None
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    sizes = (row[f"{name}_bytes"] / MIB for name in ("weights", "state", "resident"))
    planned = row.get("planned_bytes")  # Older records do not have it.
    return [
        row["start"],
        *(f"{size:.0f}" for size in sizes),
        f"{row['ratio']:.2f}",
        f"{row['peak_bytes'] / MIB:.0f}",
        f"{planned / MIB:.0f}" if planned else "-",
        f"{row['resident_bytes'] / planned:.2f}" if planned else "-",
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = dict[str, Any](spec_tokens=3, batch_buckets=[1, 8], max_len=1024)
    parser = command.new_parser("memory", __doc__, "--child", **defaults)
    add = parser.add_argument
    add("--shape", choices=LARGE, default="0.5b", help="sizes of the model")
    codes = [name for name, scheme in SCHEMES.items() if scheme.kind == "int4"]
    add("--quantize", choices=codes, metavar="SCHEME", help="random codes of a scheme, not weights")
    command.add_files(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
