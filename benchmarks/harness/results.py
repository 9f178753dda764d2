"""A benchmark's record, and the files that are written of it.

The record is JSON. It has everything that was measured, the machine, the versions and the
arguments. It has no paths.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine, describe_versions
from benchmarks.harness.tables import Record, Table, pipes

ON_PAPER = {"cpu": "no machine: computed on paper"}
"""The `machine` of a record of figures that follow from sizes."""


def new_record(benchmark: str, args: argparse.Namespace, measured: Mapping[str, Any]) -> Record:
    """The record of a run.

    Args:
        benchmark: the module that ran.
        args: its command line; paths are left out, and so is what was not given.
        measured: what else the record holds, `rows` among it.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    arguments = {name: value for name, value in given.items() if not _has_path(value)}
    return {
        "benchmark": benchmark,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "arguments": arguments,
        **measured,
    }


def _has_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, list) and any(map(_has_path, value)))


def write_results(args: argparse.Namespace, record: Record, table: Table) -> None:
    """Write the files of the options `command.RESULTS`, and the folders that they lack."""
    texts: dict[str, Callable[[Record], str]] = {
        # Without indentation: samples of serving are traces, a line a number.
        "out": json.dumps,
        "csv": to_csv,
        "markdown": lambda record: to_markdown(record, table),
    }
    for name, text in texts.items():
        if path := getattr(args, name, None):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(record))


def to_markdown(record: Record, table: Table) -> str:
    """The table, its notes, and what it was measured on."""
    notes = list(table.notes)
    for name in ("machine", "versions", "arguments"):
        if record[name]:
            notes.append(f"{name}: {', '.join(f'{k} {v}' for k, v in record[name].items())}")
    return "\n".join([*pipes(table.columns, table.cells), "", *(f"- {n}" for n in notes), ""])


def to_csv(record: Record) -> str:
    """A line per row, with the processor and the versions; samples and the like left out."""
    facts = {"cpu": record["machine"]["cpu"], **record["versions"]}
    rows = [
        {n: v for n, v in row.items() if not isinstance(v, (list, tuple, dict))} | facts
        for row in record["rows"]
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
