"""Seconds and memory of a cold build, stage by stage: by layers, and by options.

    python -m benchmarks.compile                           # the 0.5B shape at 7, 14 and 28 layers
    python -m benchmarks.compile --layers 28 --spec-tokens 0 1 3

Every row is a process of its own, which finds the C++ kernels and no step in the graph cache. The
last row builds nothing: it is the warm start of the case before it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.results import Record, Table, publish

MIB = 2**20
STAGES = ("trace model", "trace", "rewrite", "lower", "capture", "load")
COLUMNS = ("build", "layers", "K", "buckets", "steps", "seconds", *STAGES, "other", "peak MiB",
           "weights MiB", "cache MiB")  # fmt: skip
NOTES = (
    "seconds: from the call of mtpc.compile to its return. Stages are summed over all steps; where",
    "several processes build, the stages of the parent alone are known, and the rest is 'other'.",
    "peak: the largest resident set of any one process, imports included.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    if args.child:
        print(json.dumps(_build(json.loads(args.child))))
        return 0
    tell = command.teller()
    rows: list[dict[str, Any]] = []
    with command.working_directory(args.workdir) as workdir:
        cache = workdir.absolute() / "cache"
        tell("the C++ kernels")
        directory = _checkpoint(workdir, "tiny", 2)
        rows.append(_measure("kernels", directory, cache, 2, dict(spec_tokens=1)))
        for layers in args.layers:
            directory = _checkpoint(workdir, args.shape, layers)
            for spec_tokens in args.spec_tokens:
                options = dict(
                    spec_tokens=spec_tokens, batch_buckets=args.buckets, max_len=args.max_len
                )
                tell(f"{layers} layers, K={spec_tokens}")
                rows.append(_measure("cold", directory, cache, layers, options))
        tell("warm")
        rows.append(_measure("warm", directory, cache, layers, options))
    publish("compile", args, {"rows": rows}, table)
    return 0


def table(record: Record) -> Table:
    """A record's table."""
    return Table("Build", COLUMNS, [_cells(row) for row in record["rows"]], NOTES)


def _checkpoint(workdir: Path, shape: str, layers: int) -> Path:
    directory = workdir.absolute() / f"mimo-{shape}-{layers}"
    if not directory.is_dir():
        sizes = replace(SHAPES[shape], num_hidden_layers=layers)
        write_checkpoint(directory, "mimo", sizes, accepting=False)
    return directory


def _measure(
    build: str, directory: Path, cache: Path, layers: int, options: dict[str, Any]
) -> dict[str, Any]:
    job = {"directory": str(directory), "cache": str(cache), "options": options}
    child = [sys.executable, "-m", "benchmarks.compile", "--child", json.dumps(job)]
    done = subprocess.run(child, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {"build": build, "layers": layers, "options": options,
            **json.loads(done.stdout.splitlines()[-1])}  # fmt: skip


def _build(job: dict[str, Any]) -> dict[str, Any]:
    """What building, or a warm start, takes in this process."""
    import mtpc

    reached: list[tuple[float, str]] = []

    def listen(progress: Any) -> None:
        reached.append((time.perf_counter(), progress.stage))

    compile_model, start = mtpc.compile, time.perf_counter()
    model = compile_model(
        job["directory"], cache_dir=job["cache"], backend="cpu", progress=listen, **job["options"]
    )
    end = time.perf_counter()
    stages = dict.fromkeys((*STAGES, "other"), 0.0)
    points = [(start, "other"), *reached, (end, "")]
    for (begin, stage), (until, _) in pairwise(points):
        stages[stage if stage in stages else "other"] += until - begin
    files = Path(job["cache"]).rglob("*")
    weights = Path(job["directory"]).glob("*.safetensors")
    usage = (resource.getrusage(who).ru_maxrss for who in
             (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))  # fmt: skip
    return dict(
        seconds=end - start,
        stages=stages,
        steps=len(model.program.steps),
        peak_bytes=1024 * max(usage),
        weights_bytes=sum(file.stat().st_size for file in weights),
        cache_bytes=sum(file.stat().st_size for file in files if file.is_file()),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    options = row["options"]
    buckets = ", ".join(map(str, options.get("batch_buckets", ["default"])))
    seconds = [row["seconds"], *(row["stages"][stage] for stage in (*STAGES, "other"))]
    sizes = (row[f"{name}_bytes"] / MIB for name in ("peak", "weights", "cache"))
    return [
        *(row["build"], str(row["layers"]), str(options["spec_tokens"]), buckets),
        *(str(row["steps"]), *(f"{each:.1f}" for each in seconds)),
        *(f"{size:.0f}" for size in sizes),
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("compile", __doc__)
    add = parser.add_argument
    command.add_model(parser)
    add("--layers", nargs="+", type=positive, default=[7, 14, 28], metavar="N")
    add("--spec-tokens", nargs="+", type=int, default=[3], metavar="K")
    add("--buckets", nargs="+", type=positive, default=[1, 4, 8], metavar="N")
    add("--max-len", type=positive, default=512, metavar="N")
    command.add_files(parser)
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
