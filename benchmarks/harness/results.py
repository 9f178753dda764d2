"""A benchmark's record, and the text that is made of it.

The record is JSON. It has everything that was measured, the machine, the versions and the
arguments. It has no paths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
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


def write_record(path: Path | None, record: Record) -> None:
    """Write a record as JSON, and the folders that it lacks; None writes nothing."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without indentation: samples of serving are traces, a line a number.
        path.write_text(json.dumps(record))


def to_markdown(record: Record, table: Table) -> str:
    """The table, its notes, and what it was measured on."""
    notes = list(table.notes)
    for name in ("machine", "versions", "arguments"):
        if record[name]:
            notes.append(f"{name}: {', '.join(f'{k} {v}' for k, v in record[name].items())}")
    return "\n".join([*pipes(table.columns, table.cells), "", *(f"- {n}" for n in notes), ""])
