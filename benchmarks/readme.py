"""README's table of decode figures, made from a results file.

    python -m benchmarks.readme benchmarks/results/decode-0.5b-amx.json

Writes what stands between two comments of README.md: mtpc's rows, over vLLM and transformers in
the same run, and how near they are to reading the weights once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import new_parser
from benchmarks.harness.sampling import Row
from benchmarks.report import COLUMNS as REPORTED
from benchmarks.report import cells

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by benchmarks.readme -->", "<!-- end of what was made -->"
COLUMNS = {
    "K": "K",
    "batch": "batch",
    "ms/step": "ms a step",
    "tokens/s": "tokens/s",
    "vs vLLM": "over vLLM",
    "vs tf": "over transformers",
    "efficiency": "of the memory limit",
}
"""Of the report's columns, and what they are called here."""
COMPARABLE = 1.1
"""Bandwidths of two rows that differ by more are told beside their ratio."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table."""
    parser = new_parser("readme", __doc__)
    parser.add_argument("results", type=Path, help="JSON that benchmarks.decode wrote")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="to write it to")
    args = parser.parse_args(argv)
    results = args.results.resolve()
    if not results.is_relative_to(ROOT):
        parser.error(f"{results} is not in the repository, where README's link would find it")
    text = args.file.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        parser.error(f"{args.file} has no place for the table: {BEGIN} and {END}, once each")
    try:
        made = table(results)
    except ValueError as error:
        parser.error(f"{results}: {error}")
    args.file.write_text(replace(text, made))
    return 0


def replace(text: str, made: str) -> str:
    """A text with what was made in its place."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{made}\n{text[end:]}"


def table(path: Path) -> str:
    """The line above the table, and the table, in Markdown.

    Args:
        path: of the results, in the repository.

    Raises:
        ValueError: they are of several models.
    """
    results = json.loads(path.read_text())
    # Random weights: what a step costs.
    rows = [Row(**row) for row in results["rows"] if row["weights"] == "random"]
    models = {row.model for row in rows}
    if len(models) != 1:
        raise ValueError(f"rows of {sorted(models)} with random weights; expected one model")
    cells_of = [dict(zip(REPORTED, line, strict=True)) for line in cells(rows)]
    peers = {(r.spec_tokens, r.batch): r for r in rows if r.engine == "vLLM"}
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for row, found in sorted(zip(rows, cells_of, strict=True), key=lambda pair: _place(pair[0])):
        if row.engine == "mtpc":  # Plain drafts: the default.
            peer = peers.get((row.spec_tokens, row.batch))
            found["vs vLLM"] += _mark(row, peer)
            lines.append([found[name] for name in COLUMNS])
    return "\n".join([_about(path, results, rows), "", *(f"| {' | '.join(x)} |" for x in lines)])


def _place(row: Row) -> tuple[int, int]:
    return row.batch, row.spec_tokens


def _mark(row: Row, peer: Row | None) -> str:
    """Where memory was faster in one of two rows, so that their ratio says less."""
    if peer is None:
        return ""
    faster = row.bandwidth_gb_s / peer.bandwidth_gb_s
    return "" if 1 / COMPARABLE <= faster <= COMPARABLE else f" (memory {faster:.2f}x)"


def _about(path: Path, results: dict[str, Any], rows: Sequence[Row]) -> str:
    machine, versions = results["machine"], results["versions"]
    cpu = re.sub(r"\((R|TM)\)", "", machine["cpu"])
    link = path.relative_to(ROOT).with_suffix(".md")
    samples = sorted({row.samples for row in rows})
    return (
        f"{rows[0].model} {results['arguments']['shape']}, bfloat16, random weights, on "
        f"{machine['threads']} threads of {cpu}, {' to '.join(map(str, samples))} sample(s) a row "
        f"([all rows]({link}), commit {versions['commit'][:7]}):"
    )


if __name__ == "__main__":
    sys.exit(main())
