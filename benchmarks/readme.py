"""README's table of decode figures, made from a results file.

    python -m benchmarks.readme benchmarks/results/decode-0.5b-amx.json

Writes what stands between two comments of README.md: mtpc's rows, over vLLM and transformers in
the same run, and how near they are to reading the weights once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import COLUMNS as REPORTED
from benchmarks.report import cells
from benchmarks.sampling import Row

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


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", type=Path, help="JSON that benchmarks.decode wrote")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="to write it to")
    args = parser.parse_args(argv)
    results = args.results.resolve()
    text = args.file.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        parser.error(f"{args.file} has no place for the table: {BEGIN} and {END}, once each")
    args.file.write_text(replace(text, table(results)))
    return 0


def replace(text: str, made: str) -> str:
    """A text with what was made in its place."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{made}\n{text[end:]}"


def table(path: Path) -> str:
    """The table and the line above it, in Markdown.

    Args:
        path: of the results, in the repository.
    """
    results = json.loads(path.read_text())
    rows = [Row(**row) for row in results["rows"]]
    reported = [dict(zip(REPORTED, line, strict=True)) for line in cells(rows)]
    # Random weights: what a step costs. Plain drafts: the default.
    ours = [line for line in reported if (line["engine"], line["weights"]) == ("mtpc", "random")]
    ours.sort(key=lambda line: (int(line["batch"]), int(line["K"])))
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    lines += [[line[name] for name in COLUMNS] for line in ours]
    return "\n".join([_about(path, results), "", *(f"| {' | '.join(line)} |" for line in lines)])


def _about(path: Path, results: dict[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    cpu = re.sub(r"\((R|TM)\)", "", machine["cpu"])
    name = path.relative_to(ROOT)
    models = sorted({f"{row['model']} {results['arguments']['shape']}" for row in results["rows"]})
    return (
        f"{', '.join(models)}, bfloat16, random weights, on {machine['threads']} threads of {cpu} "
        f"([all rows]({name.with_suffix('.md')}), commit {versions['commit'][:7]}):"
    )


if __name__ == "__main__":
    sys.exit(main())
