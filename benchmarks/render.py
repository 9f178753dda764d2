"""Makes the Markdown file of each record, and the tables in the documents, from the records.

    python -m benchmarks.render            # write every file that differs
    python -m benchmarks.render --check    # only list these files; exit code 1 if there are any

A record is `benchmarks/results/MACHINE/QUESTION.json`, which a benchmark wrote with `--out`. Its
table is in a Markdown file next to it. README.md and the documents show parts of these tables, each
between two comments:

    <!-- made by benchmarks.render: MACHINE/QUESTION where engine=mtpc by batch show K, batch -->
    <!-- end of what was made -->

`where` keeps the rows whose cells have these texts, `by` orders rows by the numbers of a column,
and `show` chooses columns. Each of the three is optional. Commas separate several.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.tables import Record, Table, pipes, to_markdown

RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of what was made -->"
BLOCK = re.compile(rf"(<!-- made by benchmarks\.render: (.*?) -->\n).*?({END})", re.DOTALL)
WANTED = re.compile(
    r"(?P<name>\S+)(?: where (?P<where>.*?))?(?: by (?P<by>.*?))?(?: show (?P<show>.*))?"
)


class RenderError(Exception):
    """A block asks for something that does not exist; the message names it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files that differ, or list them."""
    parser = command.new_parser("render", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if anything differs"
    )
    args = parser.parse_args(argv)
    different = stale()
    for path, text in different.items():
        print(f"{path.relative_to(ROOT)} {'differs' if args.check else 'written'}")
        if not args.check:
            path.write_text(text)
    return int(args.check and bool(different))


def stale() -> dict[Path, str]:
    """The files that differ from their expected content, with that content."""
    made = rendered().items()
    return {path: text for path, text in made if not path.is_file() or path.read_text() != text}


def rendered() -> dict[Path, str]:
    """The expected content of every file with generated parts."""
    texts = {path.with_suffix(".md"): to_markdown(*load(path)) for path in RESULTS.rglob("*.json")}
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = document.read_text()
        if BLOCK.search(text):
            texts[document] = fill(text, document.parent)
    return texts


def fill(text: str, directory: Path) -> str:
    """A document with its blocks generated again.

    Args:
        text: the document's text.
        directory: the document's directory, to which links are relative.

    Raises:
        RenderError: see `block`.
    """
    return BLOCK.sub(lambda m: f"{m[1]}{block(' '.join(m[2].split()), directory)}\n{m[3]}", text)


def block(wanted: str, directory: Path) -> str:
    """The text between the two comments: the source, and a part of the table.

    Raises:
        RenderError: there is no such record or column, or no row is left.
    """
    match = WANTED.fullmatch(wanted)
    path = RESULTS / f"{match['name']}.json" if match else None
    if match is None or path is None or not path.is_file():
        raise RenderError(f"{wanted!r} does not begin with the name of a record, MACHINE/QUESTION")
    record, table = load(path)
    names, rows = list(table.columns), list(table.cells)

    def index(column: str) -> int:
        if column not in names:
            raise RenderError(f"{wanted!r}: there is no column {column!r} among {names}")
        return names.index(column)

    for condition in (match["where"] or "").split(", ") if match["where"] else ():
        column, _, text = condition.partition("=")
        rows = [row for row in rows if row[index(column)] == text]
    if not rows:
        raise RenderError(f"{wanted!r}: no row is left")
    if match["by"]:
        rows = sorted(rows, key=lambda row: float(row[index(match["by"])]))
    shown = (
        [index(name) for name in match["show"].split(", ")] if match["show"] else range(len(names))
    )
    cells = [[row[i] for i in shown] for row in rows]
    lines = pipes([names[i] for i in shown], cells)
    return "\n".join([_source(path, record, directory), "", *lines])


@cache
def load(path: Path) -> tuple[Record, Table]:
    """A record, and its table, which the benchmark's module makes."""
    record = json.loads(path.read_text())
    module = importlib.import_module(f"benchmarks.{record['benchmark']}")
    return record, module.table(record)


def _source(path: Path, record: Record, directory: Path) -> str:
    """The source of a table's figures, with a link to the whole table."""
    machine, commit = record["machine"], record["versions"].get("commit")
    cpu = re.sub(r"\((R|TM)\)", "", machine["cpu"])
    threads = f"{machine['threads']} threads of " if "threads" in machine else ""
    link = os.path.relpath(path.with_suffix(".md"), directory)
    known = f", commit {commit[:7]}" if commit else ""
    return f"{path.parent.name}: {threads}{cpu}{known}\n([the whole table]({link})):"


if __name__ == "__main__":
    sys.exit(main())
