"""A budget of rows beside fixed K: requests of which half are easy to draft for, and half hard.

    python -m benchmarks.budgets --batches 4 8 --out RESULTS.json

Weights are random, and acceptance is synthetic: its mean is that of a published acceptance length
(`mtpc.acceptance.GOLDEN_LENGTHS`), from which easy requests are as far above as hard ones are
below. A table by committed length says what a step accepts, so easy requests have short prompts,
and hard ones prompts that begin where the table changes. Each case decodes all requests of a batch
at once, until the first of them ends; cases take turns. "budget" chooses K, too.

Two bounds say what any choice of rows could reach. A step with B rows is taken to cost what the
fixed K at both sides of B cost, so drafts that are proposed and not verified cost nothing. One
bound knows the rates of each request, and the other which drafts will be accepted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Columns,
    Counts,
    Record,
    Table,
    publish,
    sample_counts,
)
from benchmarks.harness.sampling import Sampled, in_rounds
from mtpc.acceptance import GOLDEN_LENGTHS
from mtpc.step.synthetic import draws

EASY, HARD = 32, 288
"""Tokens of the prompts."""
SPREAD = 0.8
"""How far the rates of easy and hard requests lie from the mean, of what is possible."""
NOTES = (
    "tokens a step: of each request.",
    "budget: the engine chooses K and how many rows a step verifies, the step which.",
    "rates known, drafts known: what no choice of rows exceeds that knows these, where drafts that "
    "are not verified cost nothing.",
    SAMPLES_NOTE,
)


@dataclass(frozen=True)
class Taken:
    """One sample."""

    tokens_per_s: float
    tokens_per_step: float
    foreign_share: float

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s"


@dataclass
class Case(Sampled[Taken]):
    """A model at a batch size."""

    name: str
    batch: int
    model: mtpc.SpecModel
    samples: list[Taken] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} batch {self.batch}"

    def sample(self, new_tokens: int) -> Taken:
        """Decode one batch until a request has its new tokens."""
        model, vocab = self.model, 1000
        prompts = [
            [(7 * row + place) % vocab for place in range(HARD if row % 2 else EASY)]
            for row in range(self.batch)
        ]
        engine = model.engine
        engine.reset_prefix_cache()
        model.generate(prompts, 2, ignore_eos=True)  # The prompts' pages are there afterwards.
        ids = [engine.add(prompt, new_tokens) for prompt in prompts]
        engine.step()
        before, watch = model.stats.decode_counts(), CpuWatch()
        while not any(output.finish_reason for output in engine.step()):
            pass
        for each in ids:
            engine.abort(each)
        used = model.stats.decode_counts() - before
        per_step = used.tokens / used.request_steps
        return Taken(used.tokens / used.seconds, per_step, watch.foreign_share())


@dataclass(frozen=True)
class Row(Counts):
    """The figures of a case: medians over samples."""

    case: str
    batch: int
    tokens_per_s: float
    tokens_per_step: float


def rates(length: str, spec_tokens: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The acceptance rates of easy and of hard requests."""
    lengths = {0: 1.0, **GOLDEN_LENGTHS[length]}
    means = [lengths[k] - lengths[k - 1] for k in range(1, spec_tokens + 1)]
    away = [SPREAD * min(mean, 1 - mean) for mean in means]
    pairs = list(zip(means, away, strict=True))
    return tuple(m + a for m, a in pairs), tuple(m - a for m, a in pairs)


def set_acceptance(model: mtpc.SpecModel, length: str) -> None:
    """Write the table of a model that was compiled with synthetic acceptance."""
    table = model.program.shared["state.synthetic_draws"]
    easy, hard = (draws(each, len(table)) for each in rates(length, model.options.spec_tokens))
    is_hard = torch.arange(len(table)) >= HARD
    model.program.write(table, torch.where(is_hard, hard, easy))


def bounds(fixed: Sequence[Row], each: Sequence[tuple[float, ...]]) -> list[Row]:
    """The most tokens per second of a batch, by what a choice of rows knows.

    Args:
        fixed: the rows of K = 0 to the largest.
        each: the rates of easy and of hard requests.
    """
    batch, most = fixed[0].batch, len(fixed) - 1
    times = [batch * row.tokens_per_step / row.tokens_per_s for row in fixed]

    def seconds(num_rows: float) -> float:
        k = min(int(num_rows / batch) - 1, most - 1)
        return times[k] + (times[k + 1] - times[k]) * (num_rows / batch - k - 1)

    def best(case: str, emitted: Iterable[tuple[float, float]]) -> Row:
        """Of pairs of tokens and rows."""
        tokens, num_rows = max(emitted, key=lambda pair: pair[0] / seconds(pair[1]))
        figures = (batch, tokens / seconds(num_rows), tokens / batch)
        return Row(case, *figures, samples=0, discarded=0, disturbed=False, taken=())

    chances = sorted((c for row in range(batch) for c in each[row % 2]), reverse=True)
    sums = [batch + gain for gain in accumulate(chances, initial=0.0)]
    means = [batch * row.tokens_per_step for row in fixed]
    return [
        best("rates known", zip(sums, range(batch, batch * (most + 1) + 1), strict=True)),
        best("drafts known", zip(means, means, strict=True)),
    ]


def table(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    asked = record["arguments"]
    each = rates(asked["length"], asked["spec_tokens"])
    for batch in dict.fromkeys(row.batch for row in rows):
        fixed_rows = [row for row in rows if row.batch == batch and row.case.startswith("K")]
        rows += bounds(fixed_rows, each)

    def fixed(row: Row) -> list[float]:
        """Tokens per second of each fixed K at a row's batch, from K = 0 on."""
        return [r.tokens_per_s for r in rows if r.batch == row.batch and r.case.startswith("K")]

    columns: Columns[Row] = {
        "case": lambda row: row.case,
        "batch": lambda row: str(row.batch),
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "tokens a step": lambda row: f"{row.tokens_per_step:.2f}",
        "of best fixed": lambda row: f"{row.tokens_per_s / max(fixed(row)):.2f}",
        "of K=0": lambda row: f"{row.tokens_per_s / fixed(row)[0]:.2f}",
        "samples": sample_counts,
    }
    return Table.of("A budget of rows", columns, rows, NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    cases = []
    with command.working_directory(args.workdir) as workdir:
        directory = command.write_mimo(args, workdir, tell).directory
        most = args.spec_tokens
        asked: dict[str, dict[str, Any]] = {f"K={k}": {"spec_tokens": k} for k in range(most + 1)}
        chosen = {"spec_tokens": "auto", "spec_tiers": range(most + 1)}
        asked["auto"] = chosen
        asked["budget"] = chosen | {"row_budgets": range(2, most + 2)}
        for name, options in asked.items():
            tell(f"compile {name}")
            count = options["spec_tokens"] if "spec_tiers" not in options else most
            model = mtpc.compile(
                directory,
                batch_buckets=tuple(args.batches),
                max_len=HARD + args.new_tokens + command.HEADROOM,
                backend=args.backend,
                quantize=args.quantize,
                synthetic_acceptance_rates=(0.0,) * count,
                **options,
            )
            if model.options.spec_tokens:
                set_acceptance(model, args.length)
            cases += [Case(name, batch, model) for batch in args.batches]
        for case in cases:  # Warms up, and teaches costs.
            tell(f"warm up: {case}: {case.sample(args.new_tokens)}")
        count = (args.repeats, args.max_foreign)
        in_rounds(cases, *count, lambda case: case.sample(args.new_tokens), tell)
    rows = [asdict(_row(case, args.max_foreign)) for case in cases]
    publish("budgets", args, {"rows": rows}, table)
    return 0


def _row(case: Case, max_foreign: float) -> Row:
    kept = case.kept(max_foreign)
    return Row(
        case=case.name,
        batch=case.batch,
        tokens_per_s=median(sample.tokens_per_s for sample in kept),
        tokens_per_step=median(sample.tokens_per_step for sample in kept),
        **case.counts(max_foreign),
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "budgets", __doc__, *command.FILES, "--shape", "--backend", *command.SAMPLING,
        spec_tokens=3, batches=[4, 8], new_tokens=240, repeats=3,
    )  # fmt: skip
    add = parser.add_argument
    add("--length", choices=GOLDEN_LENGTHS, default="glm-5.2", help="the mean acceptance")
    add("--quantize", metavar="SCHEME", help="of all engines")
    args = parser.parse_args(argv)
    if args.new_tokens >= HARD - EASY:
        parser.error(f"--new-tokens is {args.new_tokens}; expected less than {HARD - EASY}")
    return args


if __name__ == "__main__":
    sys.exit(main())
