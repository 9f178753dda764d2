"""A benchmark's record, and its rendering as a table, Markdown and CSV.

The record is JSON. It has everything that was measured, the machine, the versions and the
arguments. It has no paths.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.machine import describe_machine, describe_versions
from benchmarks.harness.tables import Record, Table, pipes

SAMPLES_NOTE = (
    "samples: kept + dropped because other processes used the CPU; "
    "*: all were disturbed, none dropped."
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The samples that a row is of.

    Attributes:
        samples: how many are kept.
        discarded: how many were dropped, because other processes used the CPU.
        disturbed: whether all were disturbed, so that none was dropped.
        taken: all of them.
    """

    samples: int
    discarded: int
    disturbed: bool
    taken: tuple[Any, ...]


def sample_counts(row: Counts) -> str:
    """The cell that `SAMPLES_NOTE` explains."""
    return f"{row.samples}+{row.discarded}{'*' * row.disturbed}"


R = TypeVar("R")
Columns = Mapping[str, Callable[[R], str]]
"""Heading of a column -> the cell of a row."""


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


def earlier_rows(
    benchmark: str, args: argparse.Namespace, free: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The rows of a run that ended early: of `args.out`, if it exists.

    Args:
        benchmark: the module that runs.
        args: its command line, which must be that of the earlier run.
        free: arguments that may differ.

    Raises:
        SystemExit: another argument differs.
    """
    if not args.out or not args.out.is_file():
        return []
    before, anything = json.loads(args.out.read_text()), dict.fromkeys(free)
    now = json.loads(json.dumps(new_record(benchmark, args, {})))
    if {**before["arguments"], **anything} != {**now["arguments"], **anything}:
        raise SystemExit(f"{args.out} has results of other arguments; give another --out")
    rows: list[dict[str, Any]] = before["rows"]
    return rows


def write_results(args: argparse.Namespace, record: Record, table: Table) -> None:
    """Write the files of the options `command.RESULTS`, and the folders that they lack."""
    for path in filter(None, (args.out, args.csv, args.markdown)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.out:
        # Without indentation: samples of serving are traces, a line a number.
        args.out.write_text(json.dumps(record))
    if args.csv:
        args.csv.write_text(to_csv(record))
    if args.markdown:
        args.markdown.write_text(to_markdown(record, table))


def save(
    benchmark: str,
    args: argparse.Namespace,
    measured: Mapping[str, Any],
    to_table: Callable[[Record], Table],
) -> Table:
    """Write what is measured so far to the files that were asked for; returns its table.

    Args:
        benchmark: the module that runs.
        args: its command line.
        measured: see `new_record`.
        to_table: the module's `table`.
    """
    record = new_record(benchmark, args, measured)
    table = to_table(record)
    write_results(args, record, table)
    return table


def publish(
    benchmark: str,
    args: argparse.Namespace,
    measured: Mapping[str, Any],
    to_table: Callable[[Record], Table],
) -> None:
    """At the end of a run: `save`, and print the table."""
    save(benchmark, args, measured, to_table).print()


def publish_parts(
    benchmark: str,
    args: argparse.Namespace,
    parts: Iterable[Sequence[Any]],
    to_table: Callable[[Record], Table],
) -> None:
    """`save` after each part of a run, so that an interrupt loses the running one only; then print.

    Args:
        benchmark: the module that runs.
        args: its command line.
        parts: some more rows, which are dataclasses or dictionaries, each.
        to_table: the module's `table`.
    """
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += [row if isinstance(row, dict) else asdict(row) for row in part]
        table = save(benchmark, args, {"rows": rows}, to_table)
    table.print()


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
