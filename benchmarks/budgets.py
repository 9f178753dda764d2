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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import HEADROOM, Benchmark, Run
from benchmarks.harness.rounds import Case
from benchmarks.harness.tables import SAMPLES, Column, Record, Row, TableForm, fields, over
from mtpc.acceptance import GOLDEN_LENGTHS
from mtpc.step.synthetic import draws

EASY, HARD = 32, 288
"""Tokens of the prompts."""
SPREAD = 0.8
"""How far the rates of easy and hard requests lie from the mean, of what is possible."""


def _decode(model: mtpc.SpecModel, batch: int, new_tokens: int) -> Row:
    """Decode one batch until a request has its new tokens."""
    vocab, engine = 1000, model.engine
    prompts = [
        [(7 * row + place) % vocab for place in range(HARD if row % 2 else EASY)]
        for row in range(batch)
    ]
    engine.reset_prefix_cache()
    model.generate(prompts, 2, ignore_eos=True)  # The prompts' pages are there afterwards.
    ids = [engine.add(prompt, new_tokens) for prompt in prompts]
    engine.step()
    before = model.stats.decode_counts()
    while not any(output.finish_reason for output in engine.step()):
        pass
    for each in ids:
        engine.abort(each)
    used = model.stats.decode_counts() - before
    per_step = used.tokens / used.request_steps
    return dict(tokens_per_s=used.tokens / used.seconds, tokens_per_step=per_step)


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
    batch, most = fixed[0]["batch"], len(fixed) - 1
    times = [batch * row["tokens_per_step"] / row["tokens_per_s"] for row in fixed]

    def seconds(num_rows: float) -> float:
        k = min(int(num_rows / batch) - 1, most - 1)
        return times[k] + (times[k + 1] - times[k]) * (num_rows / batch - k - 1)

    def best(case: str, emitted: Iterable[tuple[float, float]]) -> Row:
        """Of pairs of tokens and rows."""
        tokens, num_rows = max(emitted, key=lambda pair: pair[0] / seconds(pair[1]))
        figures = dict(tokens_per_s=tokens / seconds(num_rows), tokens_per_step=tokens / batch)
        counts = dict(samples=0, discarded=0, disturbed=False)
        return dict(case=case, batch=batch, **figures, **counts)

    chances = sorted((c for row in range(batch) for c in each[row % 2]), reverse=True)
    sums = [batch + gain for gain in accumulate(chances, initial=0.0)]
    means = [batch * row["tokens_per_step"] for row in fixed]
    return [
        best("rates known", zip(sums, range(batch, batch * (most + 1) + 1), strict=True)),
        best("drafts known", zip(means, means, strict=True)),
    ]


def _fixed(batch: int, rows: Sequence[Row]) -> list[Row]:
    """Those of each fixed K at a batch, from K = 0 on."""
    return [row for row in rows if row["batch"] == batch and row["case"].startswith("K")]


def _rows(record: Record) -> list[Row]:
    """With the bounds of each batch."""
    rows, asked = list(record["rows"]), record["arguments"]
    each = rates(asked["length"], asked["spec_tokens"])
    for batch in dict.fromkeys(row["batch"] for row in record["rows"]):
        rows += bounds(_fixed(batch, rows), each)
    return rows


def _of_best(row: Row, rows: Sequence[Row]) -> float:
    best = max(other["tokens_per_s"] for other in _fixed(row["batch"], rows))
    return float(row["tokens_per_s"] / best)


FORM = TableForm(
    "A budget of rows",
    (
        *fields("case, batch, tokens/s=tokens_per_s:.1f"),
        Column("tokens a step", "tokens_per_step", ".2f", "of each request."),
        Column("of best fixed", _of_best, ".2f"),
        Column("of K=0", over("tokens_per_s", ("batch",), case="K=0"), ".2f"),
        SAMPLES,
    ),
    (
        "budget: the engine chooses K and how many rows a step verifies, the step which.",
        "rates known, drafts known: what no choice of rows exceeds that knows these, where drafts "
        "that are not verified cost nothing.",
    ),
    _rows,
)


def measure(run: Run) -> Iterator[list[Row]]:
    """Every fixed K, "auto" and budgets, at each batch."""
    args, cases = run.args, list[Case]()
    directory, most = run.write_mimo().directory, args.spec_tokens
    asked: dict[str, dict[str, Any]] = {f"K={k}": {"spec_tokens": k} for k in range(most + 1)}
    chosen = {"spec_tokens": "auto", "spec_tiers": range(most + 1)}
    asked |= {"auto": chosen, "budget": chosen | {"row_budgets": range(2, most + 2)}}
    for name, options in asked.items():
        run.tell(f"compile {name}")
        count = options["spec_tokens"] if "spec_tiers" not in options else most
        model = mtpc.compile(
            directory,
            batch_buckets=tuple(args.batches),
            max_len=HARD + args.new_tokens + HEADROOM,
            backend=args.backend,
            synthetic_acceptance_rates=(0.0,) * count,
            **options,
        )
        if model.options.spec_tokens:
            set_acceptance(model, args.length)
        for batch in args.batches:
            take = partial(_decode, model, batch, args.new_tokens)
            cases.append(Case(dict(case=name, batch=batch), take, take))  # Warm: costs are known.
    yield run.sample(cases)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.new_tokens >= HARD - EASY:
        parser.error(f"--new-tokens is {args.new_tokens}; expected less than {HARD - EASY}")


BENCHMARK = Benchmark(
    "budgets",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--backend", *command.SAMPLING),
    dict(spec_tokens=3, batches=[4, 8], new_tokens=240, repeats=3),
    {
        "--length": dict(choices=GOLDEN_LENGTHS, default="glm-5.2", help="the mean acceptance"),
    },
    _check,
)
main, table = BENCHMARK.commands(__name__)
