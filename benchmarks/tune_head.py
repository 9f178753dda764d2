"""Accepted drafts on held-out text, before and after `mtpc tune-head` or `mtpc train-draft`.

    python examples/train_demo_model.py --texts-only --out texts
    python -m benchmarks.tune_head mtpc/demo texts/train.txt --held-out texts/held-out.txt \\
        --batch 8 --learning-rate 8e-4 --steps 3100 --continuations 5000 --out RESULTS.json
    python -m benchmarks.tune_head TARGET TEXT ... --form mtp --minutes 60 --keep DRAFTS

With `--form` a drafter is trained for a model that has none. Drafts are counted by mtpc's engine,
in greedy decoding with K drafts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.tables import Column, Record, Row, TableForm, fields
from mtpc.engine.stats import DraftCounts
from mtpc.tuning.forms import FORMS
from mtpc.tuning.run import Plan, Tuning
from mtpc.tuning.train import Schedule


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
    """Train; what is counted are facts of the record, which has no rows."""
    args = run.args
    schedule = Schedule(args.steps, args.minutes, args.batch, args.learning_rate, args.seed)
    plan = Plan(schedule, args.length, args.continuations, args.prompts, args.max_new_tokens,
                args.vocabulary, args.disk)  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        out = args.keep or Path(scratch, "tuned")
        files = (args.checkpoint, args.texts, args.held_out, out)
        tuning = Tuning(*files, plan, {"spec_tokens": args.spec_tokens}, run.tell, args.form)
        run.facts |= asdict(tuning.run(args.resume))
    yield []


BENCHMARK = Benchmark(
    "tune_head",
    __doc__,
    measure,
    FORM.of,
    (*command.RESULTS, "--seed"),
    dict(threads=1, spec_tokens=3),
    {
        "checkpoint": dict(type=Path),
        "texts": dict(nargs="+", type=Path, metavar="TEXT"),
        "--held-out": dict(action="append", default=[], type=Path, metavar="TEXT"),
        "--keep": dict(type=Path, metavar="DIR", help="keep the new checkpoint there"),
        "--resume": dict(
            action="store_true", help="go on with a run that was killed, of --keep DIR"
        ),
        "--form": dict(
            choices=sorted(FORMS),
            help="train a new drafter of this form; default: the checkpoint's own MTP layers",
        ),
        "--minutes": dict(type=float, metavar="M"),
        "--steps": command.NUMBER,
        "--learning-rate": dict(type=float, default=1e-3),
        "--batch": command.NUMBER | dict(default=12),
        "--length": command.NUMBER | dict(default=192),
        "--continuations": dict(type=int, default=1024),
        "--vocabulary": command.NUMBER | dict(default=Plan.vocabulary),
        "--disk": command.NUMBER | dict(default=Plan.disk, metavar="BYTES"),
        "--prompts": command.NUMBER | dict(default=128),
        "--max-new-tokens": command.NUMBER | dict(default=64),
    },
)
main, table = BENCHMARK.commands(__name__)
