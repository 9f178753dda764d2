"""Seconds and memory of a cold build, stage by stage: by layers, by options, and of large models.

    python -m benchmarks.compile                          # all rows
    python -m benchmarks.compile --vllm-python VENV/bin/python   # and vLLM's cold start beside them
    python -m benchmarks.compile --layers 7 28 --large    # two rows, and one start

Every row is one process, with a cache that has the C++ kernels and no step. A build reads only
headers, so it also works for models that do not fit into this machine. The last rows start a model
with weights, from the start of a process to its first token.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import startup
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run, read_report
from benchmarks.harness.large import MIMO_7B, write_hollow
from benchmarks.harness.machine import CpuWatch, tree_bytes
from benchmarks.harness.models import SHAPES, Experts, Shape, write_checkpoint
from benchmarks.harness.startup_child import size_of
from benchmarks.harness.tables import Column, Record, Row, TableForm

MIB = 2**20
LARGE = {
    "mimo 7b": ("mimo", MIMO_7B),
    "glm4_moe 30b-a3b": (
        "glm4_moe",
        Shape(2048, 48, 6144, 151936, 32, 4, Experts(128, 8, 768)),
    ),
}
"""Released sizes: of MiMo-7B, and Qwen3-30B-A3B's in a family with MTP layers."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"spec_tokens": 0},
    {"spec_tokens": 1},
    {"batch_buckets": [1]},
    {"sampling": True},
    {"quantize": "int4-g32"},
)
"""The options of the rows that differ in one option."""
STAGES = ("trace", "rewrite", "lower")
POLL_S = 0.05


def measure(run: Run) -> Iterator[list[Row]]:
    """A row for each case, and vLLM's."""
    workdir = run.workdir.absolute()
    for directory, case in _cases(run.args, workdir):
        run.tell(f"{case}")
        yield [build(directory, case, workdir / "cache", workdir / "kernels")]
    if run.args.vllm_python:
        run.tell("vLLM's cold start")
        yield [_vllm(run)]


def _cases(args: Any, workdir: Path) -> Iterator[tuple[Path, Row]]:
    """Write the checkpoints; yield each with what identifies a row, of all rows except vLLM's.

    `what` is "kernels", "build" or "start", and `changed` the option that differs in this row.
    """
    base = dict(spec_tokens=3, batch_buckets=args.buckets, max_len=args.max_len)
    shape, name = SHAPES[args.shape], f"mimo {args.shape}"

    def case(what: str, layers: int, model: str = name, changed: str = "", **options: Any) -> Row:
        return dict(what=what, model=model, layers=layers, options=base | options, changed=changed)

    def hollow(family: str, shape: Shape) -> Path:
        directory = workdir / f"{family}-{shape.hidden_size}-{shape.num_hidden_layers}"
        if not directory.is_dir():
            write_hollow(directory, family, shape)
        return directory

    whole, depth = hollow("mimo", shape), shape.num_hidden_layers
    yield whole, case("kernels", 0, "-") | {"options": {}}
    for layers in args.layers:
        yield hollow("mimo", replace(shape, num_hidden_layers=layers)), case("build", layers)
    for change in OPTIONS[: args.options]:
        changed = ", ".join(f"{k} {v}" for k, v in change.items())
        yield whole, case("build", depth, changed=changed, **change)
    for large in args.large:
        family, sizes = LARGE[large]
        changed, options = "spec_tokens 1, batch 1", dict(spec_tokens=1, batch_buckets=[1])
        layers = sizes.num_hidden_layers
        yield hollow(family, sizes), case("build", layers, large, changed, **options)
    full = workdir / f"mimo-{args.shape}"  # Where `benchmarks.startup` writes it.
    if not full.is_dir():
        write_checkpoint(full, "mimo", shape, accepting=False)
    yield full, case("start", depth)


def build(directory: Path, case: Row, cache: Path, kernels: Path) -> Row:
    """Measure a row: one process with a cache that has only kernels.

    Args:
        directory: the checkpoint.
        case: what identifies the row.
        cache: the directory of its cache, which is replaced.
        kernels: a cache with only the kernels.
    """
    shutil.rmtree(cache, ignore_errors=True)
    is_kernels = case["what"] == "kernels"
    if not is_kernels:
        shutil.copytree(kernels, cache)
    place = kernels if is_kernels else cache
    job = dict(directory=str(directory), cache=str(place), what=case["what"])
    watch, start = CpuWatch(), time.monotonic()
    with BENCHMARK.start_child({**job, "options": case["options"]}) as process:
        peak = _Peak(process.pid)
        report = read_report(process, f"{case}")
        seconds, peak_bytes = time.monotonic() - start, peak.stop()
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return dict(
        **case,
        seconds=seconds,
        peak_bytes=peak_bytes,
        weights_bytes=0 if is_kernels else weights,
        cache_bytes=size_of(place) - (0 if is_kernels else size_of(kernels)),
        foreign_share=watch.foreign_share(),
        **report,
    )


class _Peak(threading.Thread):
    """Samples the memory of a process and its children, and keeps the maximum."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._pid, self._most, self._ended = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            self._most = max(self._most, tree_bytes(self._pid))

    def stop(self) -> int:
        """Bytes."""
        self._ended.set()
        self.join()
        return self._most


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """Do the work of one process; returns the stages of its build."""
    if job["what"] == "start":
        return _start(job)
    from mtpc import CompileOptions
    from mtpc.backends.cpu_kernels import build_kernels
    from mtpc.program.processes import without_collections
    from mtpc.store.entries import EntryStore

    if job["what"] == "kernels":
        store = EntryStore(Path(job["cache"]))
        store.prepare()
        build_kernels(store)
        return {"steps": 0, "stages": {}, "processes": 1}
    with without_collections():  # As `mtpc build` does.
        from mtpc.program.build import build
        from mtpc.program.open_cache import plan_model
        from mtpc.program.processes import default_jobs

        asked = CompileOptions.parse({**job["options"], "cache_dir": job["cache"]})
        source, plan = plan_model(job["directory"], asked)
        report = build(source.directory, [plan])
    seconds = [built.step.record.seconds for built in report.steps]
    stages = {stage: sum(each.get(stage, 0.0) for each in seconds) for stage in STAGES}
    processes = min(default_jobs(), len(seconds))
    return {"steps": len(seconds), "stages": stages, "processes": processes}


def _start(job: dict[str, Any]) -> dict[str, Any]:
    import mtpc

    model = mtpc.compile(job["directory"], cache_dir=job["cache"], backend="cpu", **job["options"])
    model.generate(list(range(2, 34)), 1, ignore_eos=True)
    return {"steps": len(model.program.steps), "stages": {}, "processes": 1}


def _vllm(run: Run) -> Row:
    """vLLM's cold start on the same weights, measured as in `benchmarks.startup`."""
    args = run.args
    words = ["--shape", args.shape, "--workloads", "random", "--engines", "vllm", "--max-len",
             str(args.max_len), "--vllm-python", str(args.vllm_python)]  # fmt: skip
    asked = Run(startup.BENCHMARK, startup.BENCHMARK.parse(words), run.tell, run.workdir)
    cases = startup.cases_of("random", asked)
    (case,) = [case for case in cases if startup.engine_of(case.row).state == "cold"]
    case.attempt(run.tell)
    found = case.samples[0] if case.samples else {"seconds": None, "failure": case.failure}
    names = ("seconds", "foreign_share", "cache_bytes", "failure")
    row = dict(what="start", model=f"vLLM, mimo {args.shape}", changed="", steps=0, stages={},
               layers=SHAPES[args.shape].num_hidden_layers, options={"spec_tokens": 3},
               peak_bytes=0, weights_bytes=0, cache_bytes=0, foreign_share=0.0,
               processes=1)  # fmt: skip
    return row | {name: found[name] for name in names if name in found}


def _growth(record: Record) -> list[str]:
    """The cost of one more layer, from the first and the last row that differ only in layers."""
    rows = [row for row in record["rows"] if row["what"] == "build" and not row["changed"]]
    if len(rows) < 2:
        return []
    first, last = rows[0], rows[-1]
    each = (last["seconds"] - first["seconds"]) / (last["layers"] - first["layers"])
    return [f"a layer more costs {each:.2f} s, from {first['layers']} to {last['layers']} layers."]


def _seconds(row: Row, rows: Sequence[Row]) -> float | str:
    found: float | None = row["seconds"]
    return "not run: " + row["failure"][:80] if found is None else found


def _stage(name: str, row: Row, rows: Sequence[Row]) -> float | None:
    found: float | None = row["stages"].get(name)
    return found


def _other(row: Row, rows: Sequence[Row]) -> float | None:
    known = [row["stages"][stage] for stage in STAGES if stage in row["stages"]]
    return row["seconds"] * row["processes"] - sum(known) if known else None


def _options(row: Row, rows: Sequence[Row]) -> str | None:
    return row["changed"] or ", ".join(f"{k} {v}" for k, v in row["options"].items()) or None


def _if_any(name: str, row: Row, rows: Sequence[Row]) -> Any:
    return row[name] or None


FORM = TableForm(
    "Build",
    (
        Column(
            "what", "what", "",
            "kernels: compiled once for a machine, or carried by the wheel. The other rows find "
            "them. start: from the start of a process, whose cache holds no step, to the first "
            "token.",
        ),
        Column("model"),
        Column("layers", partial(_if_any, "layers")),
        Column("options", _options),
        Column("steps", partial(_if_any, "steps")),
        Column("seconds", _seconds, ".1f", "of the whole process, its imports included."),
        *(Column(stage, partial(_stage, stage), ".1f") for stage in STAGES),
        Column("other", _other, ".1f", "what is left of the seconds of so many processes."),
        Column(
            "peak MiB", partial(_if_any, "peak_bytes"), ".0f",
            "the most that the process and its children held at one moment, by their resident "
            "sets; pages that they share count in each.",
            1 / MIB,
        ),
        Column("weights MiB", partial(_if_any, "weights_bytes"), ".0f", "", 1 / MIB),
        Column("cache MiB", partial(_if_any, "cache_bytes"), ".0f", "", 1 / MIB),
        Column(
            "others' CPU", "foreign_share", ".0%",
            "share of the machine's CPU time that other processes used meanwhile.",
        ),
    ),
    lambda record: [
        *_growth(record),
        "trace, rewrite, lower: summed over all steps, of which two processes build at the same "
        "time.",
    ],
)  # fmt: skip
BENCHMARK = Benchmark(
    "compile",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--vllm-python"),
    dict(max_len=512),
    {
        "--layers": command.NUMBERS | dict(default=[7, 14, 28, 36]),
        "--large": dict(
            nargs="*",
            choices=LARGE,
            default=list(LARGE),
            metavar="NAME",
            help=f"also build these from headers: {', '.join(LARGE)}",
        ),
        "--options": dict(
            type=int, default=len(OPTIONS), metavar="N", help="rows of changed options"
        ),
        "--buckets": command.NUMBERS | dict(default=[1, 4, 8]),
    },
    child=_work,
)
main, table = BENCHMARK.commands(__name__)
