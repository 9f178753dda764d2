"""Makes a record of benchmarks.gpu's CSV files, on the machine that measured them.

    python -m benchmarks.gpu_record first.csv second.csv --out benchmarks/results/h100/gpu.json

The stem of a file's name is the name of the run.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import FIGURES, figures
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import Record, Row, Table

_WORDS = {"part", "device", "shape", "engine", "note"}
_CHECKS = ("ops", "gate", "sampling", "aot")


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of all files."""
    rows = [row for path in run.args.files for row in read(path)]
    devices = ", ".join(sorted({row["device"] for row in rows}))
    run.facts["machine"] = {**describe_machine(), "gpu": devices}
    yield rows


def read(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a file, with numbers parsed and without empty cells."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found = {name: _value(name, text) for name, text in row.items() if text}
            yield {"run": path.stem, **found}


def _value(name: str, text: str) -> str | float | bool:
    if name == "passed":
        return text == "True"
    return text if name in _WORDS else float(text)


def table_of(record: Record) -> Table:
    """A record's table: timed rows and the number of checks, without a profile's kernels."""
    rows = record["rows"]
    shown = [
        [row["run"], row["part"], row["shape"], row["engine"], *figures(row), row.get("note", "")]
        for row in rows
        if row["part"] in ("time", "speed", "profile")
    ]
    notes = [*record.get("notes", ()), *(f"{part}: {_passed(rows, part)}" for part in _CHECKS)]
    notes += [
        "of bandwidth: bytes of the weights that a step reads (of a kernel alone: of all that it "
        "must read), over the time on the device, against the bandwidth of a copy just before.",
        "host us: of a step, when the device had nothing to do.",
    ]
    columns = ("run", "part", "shape", "of", *FIGURES, "note")
    return Table(f"On {record['machine']['gpu']}", columns, shown, notes)


def _passed(rows: Iterable[Mapping[str, Any]], part: str) -> str:
    checks = [row for row in rows if row["part"] == part]
    passed = Counter(bool(row["passed"]) for row in checks)
    names = ", ".join(sorted({row["shape"] for row in checks}))
    return f"{passed[True]} of {len(checks)} cases passed: {names}"


BENCHMARK = Benchmark(
    "gpu_record",
    __doc__,
    measure,
    table_of,
    command.RESULTS,
    options={"files": dict(nargs="+", type=Path, help="CSV files of benchmarks.gpu")},
)
main, table = BENCHMARK.commands(__name__)
