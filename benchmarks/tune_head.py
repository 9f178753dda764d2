"""Accepted drafts on held-out text, before and after `mtpc tune-head` or `mtpc train-draft`.

    python examples/train_demo_model.py --texts-only --out texts
    python -m benchmarks.tune_head --out RESULTS.json tune-head mtpc/demo texts/train.txt \\
        --held-out texts/held-out.txt --batch 8 --learning-rate 8e-4 --steps 3100 --out tuned
    python -m benchmarks.tune_head --out RESULTS.json train-draft TARGET TEXT ... --out DRAFTS

The words after the benchmark's own options are the command, as `mtpc` takes it. Drafts are counted
by mtpc's engine, in greedy decoding with K drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.tables import Column, Record, Row, TableForm, fields
from mtpc.cli.arguments import parse
from mtpc.cli.main import main as mtpc_main
from mtpc.engine.stats import DraftCounts


def _rows(record: Record) -> list[Row]:
    """A row for the drafts before the training, if there were any, and one for those after it."""
    found = {name: DraftCounts(**record[name]) for name in ("before", "after") if record[name]}
    rows: list[Row] = [
        {
            "name": name,
            "per_step": counts.per_step,
            "by_position": " ".join(f"{rate:.1%}" for rate in counts.by_position),
            "drafts": sum(counts.drafted),
        }
        for name, counts in found.items()
    ]
    seconds = record["progress"]["processor_seconds"]
    rows[-1] |= {"steps": record["progress"]["step"], "minutes": seconds / 60}
    if "before" in found and found["before"].per_step:
        rows[-1]["more"] = rows[-1]["per_step"] / rows[0]["per_step"] - 1
    return rows


FORM = TableForm(
    "Accepted drafts on held-out text",
    (
        Column("MTP layers", "name"),
        Column(
            "accepted a step", "per_step", ".2f",
            "accepted drafts of a decode step and request, of K.",
        ),
        Column("more", "more", "+.1%", "than before."),
        Column(
            "by position", "by_position", "",
            "drafts that were accepted, of those that the engine verified (drafts).",
        ),
        *fields("drafts, steps"),
        Column(
            "processor minutes", "minutes", ".1f",
            "of the training, without the texts that the target writes before it.",
        ),
    ),
    rows=_rows,
)  # fmt: skip


def measure(run: Run) -> Iterator[list[Row]]:
    """Run the command; what it counts are facts of the record, which has no rows."""
    words, found = run.args.command, run.workdir / "found.json"
    asked = vars(parse(words))
    run.args.command = words[0]
    numbers = {name: value for name, value in asked.items() if isinstance(value, (int, float))}
    vars(run.args).update(numbers, form=asked.get("form"))
    if mtpc_main([*words, "--json", str(found)]):
        raise SystemExit(f"mtpc {words[0]} failed")
    run.facts |= json.loads(found.read_text())
    yield []


BENCHMARK = Benchmark(
    "tune_head",
    __doc__,
    measure,
    FORM.of,
    command.RESULTS,
    options={"command": dict(nargs=argparse.REMAINDER, help="tune-head or train-draft")},
)
main, table = BENCHMARK.commands(__name__)
