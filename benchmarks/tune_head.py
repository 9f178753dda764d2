"""Accepted drafts on held-out text, before and after `mtpc tune-head` or `mtpc train-draft`.

    python examples/train_demo_model.py --texts-only --out texts
    python -m benchmarks.tune_head mtpc/demo texts/train.txt --held-out texts/held-out.txt \\
        --batch 8 --learning-rate 8e-4 --steps 3100 --continuations 5000 --out RESULTS.json
    python -m benchmarks.tune_head TARGET TEXT ... --form mtp --minutes 60 --keep DRAFTS

With `--form` a drafter is trained for a model that has none. Drafts are counted by mtpc's engine,
in greedy decoding with K drafts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.results import Record, Table, publish
from mtpc.engine.stats import DraftCounts
from mtpc.tuning.forms import FORMS
from mtpc.tuning.run import Plan, Tuning
from mtpc.tuning.train import Schedule

COLUMNS = (
    "MTP layers",
    "accepted a step",
    "more",
    "by position",
    "drafts",
    "steps",
    "processor minutes",
)
NOTES = (
    "accepted a step: accepted drafts of a decode step and request, of K; more: than before.",
    "by position: drafts that were accepted, of those that the engine verified (drafts).",
    "processor minutes: of the training, without the texts that the target writes before it.",
)


def table(record: Record) -> Table:
    """A record's table."""
    found = {name: DraftCounts(**record[name]) for name in ("before", "after") if record[name]}
    base = found["before"].per_step if "before" in found else 0.0
    body = [
        [
            name,
            f"{acceptance.per_step:.2f}",
            f"{acceptance.per_step / base - 1:+.1%}" if name == "after" and base else "-",
            " ".join(f"{rate:.1%}" for rate in acceptance.by_position),
            str(sum(acceptance.drafted)),
            str(record["progress"]["step"]) if name == "after" else "-",
            f"{record['progress']['processor_seconds'] / 60:.1f}" if name == "after" else "-",
        ]
        for name, acceptance in found.items()
    ]
    return Table("Accepted drafts on held-out text", COLUMNS, body, NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    schedule = Schedule(args.steps, args.minutes, args.batch, args.learning_rate, args.seed)
    plan = Plan(schedule, args.length, args.continuations, args.prompts, args.max_new_tokens,
                args.vocabulary, args.disk)  # fmt: skip
    options = {"spec_tokens": args.spec_tokens}
    with tempfile.TemporaryDirectory() as scratch:
        out = args.keep or Path(scratch, "tuned")
        files = (args.checkpoint, args.texts, args.held_out, out)
        tuning = Tuning(*files, plan, options, tell, args.form)
        measured = asdict(tuning.run(args.resume))
    del args.texts, args.held_out  # A record holds no paths.
    publish("tune_head", args, measured, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "tune_head", __doc__, *command.RESULTS, "--seed", threads=1, spec_tokens=3,
    )  # fmt: skip
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("texts", nargs="+", type=Path, metavar="TEXT")
    add("--held-out", action="append", default=[], type=Path, metavar="TEXT")
    add("--keep", type=Path, metavar="DIR", help="keep the new checkpoint there")
    add("--resume", action="store_true", help="go on with a run that was killed, of --keep DIR")
    text = "train a new drafter of this form; default: the checkpoint's own MTP layers"
    add("--form", choices=sorted(FORMS), help=text)
    add("--minutes", type=float, metavar="M")
    add("--steps", type=positive, metavar="N")
    add("--learning-rate", type=float, default=1e-3)
    add("--batch", type=positive, default=12)
    add("--length", type=positive, default=192)
    add("--continuations", type=int, default=1024)
    add("--vocabulary", type=positive, default=Plan.vocabulary, metavar="N")
    add("--disk", type=positive, default=Plan.disk, metavar="BYTES")
    add("--prompts", type=positive, default=128)
    add("--max-new-tokens", type=positive, default=64)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
