"""Resident memory of a compiled model, compared with its weights, KV pool and buffers.

    python -m benchmarks.memory                    # the 0.5B shape: just compiled, and warm
    python -m benchmarks.memory --shape 7b --quantize int4-g32 --spec-tokens 1 --batch-buckets 1

Every row is one process (`harness.startup_child`). "Resident" is its growth from the end of its
imports until it has decoded. The peak is counted from there, too, so that the row of a process that
compiles shows the memory of compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.large import MIMO_7B, write_codes
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.startup_child import start_here
from benchmarks.harness.tables import Column, Row, TableForm
from mtpc import CompileOptions
from mtpc.layout import graph_keys
from mtpc.program.open_cache import open_cache, plan_model
from mtpc.program.program import need_of_steps
from mtpc.ranks.group import all_parts
from mtpc.weights.quantise import SCHEMES

MIB = 2**20
LARGE = {**SHAPES, "7b": MIMO_7B}


def measure(run: Run) -> Iterator[list[Row]]:
    """A process that compiles, and one that finds what is compiled."""
    names = ("spec_tokens", "batch_buckets", "max_len")
    options = {name: getattr(run.args, name) for name in names}
    run.tell(f"write {run.workdir / 'mimo'}")
    _write(run.workdir / "mimo", run.args)
    for start in ("just compiled", "warm"):
        run.tell(start)
        yield [{"start": start, **_measure(run.workdir.absolute(), options)}]


def _write(directory: Path, args: Any) -> None:
    """Write the checkpoint, unless it exists: a large one takes minutes."""
    if args.quantize is None and args.shape in SHAPES:
        write_checkpoint(directory, "mimo", SHAPES[args.shape], accepting=False)
    elif not (directory / "config.json").is_file():
        write_codes(directory, LARGE[args.shape], args.quantize)


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


def _over_planned(row: Row, rows: Sequence[Row]) -> float | None:
    """Older records do not have it."""
    return row["resident_bytes"] / row["planned_bytes"] if "planned_bytes" in row else None


FORM = TableForm(
    "Memory",
    (
        Column("start"),
        Column("weights MiB", "weights_bytes", ".0f", "the checkpoint's tensors.", 1 / MIB),
        Column("pool and buffers MiB", "state_bytes", ".0f", "", 1 / MIB),
        Column(
            "resident MiB", "resident_bytes", ".0f",
            "growth since the imports, after decoding.", 1 / MIB,
        ),
        Column(
            "ratio", "ratio", ".2f",
            "resident over weights, pool and buffers; the goal is at most 1.08, of both ratios.",
        ),
        Column(
            "peak MiB", "peak_bytes", ".0f",
            "most that was resident at any moment, less what was after the imports; of a warm "
            "start, that is packing.", 1 / MIB,
        ),
        Column(
            "planned MiB", "planned_bytes", ".0f",
            "packed weights, pool and buffers, as mtpc counts them before it binds a step; weights "
            "that are read as stored stay in their files.", 1 / MIB,
        ),
        Column("resident over planned", _over_planned, ".2f"),
    ),
)  # fmt: skip
BENCHMARK = Benchmark(
    "memory",
    __doc__,
    measure,
    FORM.of,
    command.FILES,
    dict(spec_tokens=3, batch_buckets=[1, 8], max_len=1024),
    {
        "--shape": dict(choices=LARGE, default="0.5b", help="sizes of the model"),
        "--quantize": dict(
            choices=[name for name, scheme in SCHEMES.items() if scheme.kind == "int4"],
            metavar="SCHEME",
            help="random codes of a scheme, not weights",
        ),
    },
)
main, table = BENCHMARK.commands(__name__)
