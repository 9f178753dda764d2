"""What the benchmarks' command lines have in common: progress, directories, numbers, results."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.bandwidth import BUFFER_BYTES
from benchmarks.harness.machine import describe_machine, describe_versions
from benchmarks.harness.sampling import Tell
from mtpc.cli.tables import output, print_table


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def teller() -> Tell:
    """Plain lines on standard error: anything livelier would use the CPU that is measured."""
    start = time.perf_counter()

    def tell(text: str) -> None:
        print(f"[{time.perf_counter() - start:7.1f} s] {text}", file=sys.stderr, flush=True)

    return tell


def new_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of `python -m benchmarks.NAME`, described by its module's first line."""
    description = (doc or "").split("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)


def add_sampling(
    parser: argparse.ArgumentParser, repeats: int, wanted: str = "undisturbed samples per row"
) -> None:
    """The options that decide how often is measured, and how undisturbed.

    Args:
        parser: of a benchmark.
        repeats: the default.
        wanted: of what there are to be so many.
    """
    add = parser.add_argument
    add("--repeats", type=positive, default=repeats, metavar="N", help=wanted)
    add("--max-foreign", type=float, default=0.05, metavar="SHARE", help="CPU others may use")
    add("--threads", type=positive, metavar="N", help="torch's threads; default: as torch has it")
    add("--seed", type=int, default=0)


def add_probe(parser: argparse.ArgumentParser) -> None:
    """The option that sizes a `BandwidthProbe`, in MiB."""
    default, help_ = BUFFER_BYTES >> 20, "read by the probe"
    parser.add_argument("--probe-mib", type=positive, default=default, metavar="N", help=help_)


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """The option that `working_directory` takes."""
    help_ = "keep checkpoints here; default: a temporary directory"
    parser.add_argument("--workdir", type=Path, help=help_)


@contextmanager
def working_directory(path: Path | None) -> Iterator[Path]:
    """A directory for checkpoints and logs: the one given, which is kept, or a temporary one."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mtpc-benchmark-") as temporary:
        yield Path(temporary)


def add_result_files(parser: argparse.ArgumentParser) -> None:
    """The options that `write_results` reads."""
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write everything as JSON")
    add("--csv", type=Path, metavar="FILE", help="write the rows as CSV")
    add("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")


def print_results(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str]
) -> None:
    """A table on standard output, and lines below it."""
    console = output()
    print_table(console, title, columns, cells)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)


def write_results(
    args: argparse.Namespace,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    notes: Sequence[str],
    measured: Mapping[str, Any],
) -> None:
    """Write the files asked for, with the machine, versions and arguments.

    Args:
        args: with `out`, `csv` and `markdown`, paths or None.
        columns: headings of the table in Markdown.
        cells: its body.
        notes: lines below it.
        measured: everything, for JSON; its `rows` are those of the CSV.
    """
    context: dict[str, dict[str, Any]] = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "arguments": vars(args),
    }
    if args.out:
        # Without indentation: samples of serving are traces, a line a number.
        args.out.write_text(json.dumps({**context, **measured}, default=str))
    if args.csv:
        facts = {"cpu": context["machine"]["cpu"], **context["versions"]}
        rows = [{**_numbers(row), **facts} for row in measured["rows"]]
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if args.markdown:
        table = [columns, ["---"] * len(columns), *cells]
        about = [f"{k}: {', '.join(f'{n} {v}' for n, v in c.items())}" for k, c in context.items()]
        lines = [*(f"| {' | '.join(line)} |" for line in table), ""]
        args.markdown.write_text("\n".join([*lines, *(f"- {n}" for n in (*notes, *about)), ""]))


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what does not fit a cell: single samples, and the like."""
    return {name: v for name, v in row.items() if not isinstance(v, (list, tuple, dict))}
