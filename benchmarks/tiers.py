"""K by load: the same requests with drafts fixed at 0, fixed at K, and chosen by the engine.

    python -m benchmarks.tiers --out RESULTS.json

There are two checkpoints of one shape, one whose drafts are all accepted and one whose drafts
hardly ever are; and two loads, a low one with few requests per step, and a burst. Drafts pay if
steps have few rows and the text is predictable. `spec_tokens="auto"` should be close to the better
fixed K in all cases. Its rows show the tokens by the K of their step.

    python -m benchmarks.tiers --acceptance 0 0.4 0.8 --out RESULTS.json

With synthetic acceptance there is one checkpoint with random weights, and every K of `--tiers` is
measured as a fixed K. K = 0 has its own program; the other fixed K use the program of "auto".
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mtpc
from benchmarks.harness import command
from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Columns,
    Counts,
    Record,
    Table,
    publish,
    sample_counts,
)
from benchmarks.harness.sampling import Tell
from benchmarks.serving import (
    MAX_LEN,
    Case,
    Load,
    MtpcServer,
    Sample,
    ms_per_token,
    percentile,
    sample_in_turns,
)
from mtpc.engine.estimates import CellCosts
from mtpc.engine.tiers import Place, TierPolicy

WEIGHTS = ("accepting", "random")
AUTO, AGAIN = "auto", "auto, costs known"
NOTES = (
    "tokens/s: all new tokens, over the seconds in which there was work: at a low load most are "
    "spent waiting for requests.",
    "of best fixed, of K=0: over the tokens/s of the best fixed K, and of K=0, for the same "
    "weights and load.",
    "tokens by K: where the engine chooses, the share of tokens by the K of their decode step; "
    "each request's first token comes with its prompt, and is not among them.",
    "Samples of auto have what it costs to learn; with synthetic acceptance, each one all of it. "
    "'costs known' begins with the costs that the samples of auto before it have measured, as a "
    "second start does, and learns acceptance.",
    SAMPLES_NOTE,
)


class TierServer:
    """An engine on one of the checkpoints.

    Args:
        model: a compiled model.
        weights: the name of its checkpoint.
        spec_tokens: K, or "auto".
    """

    def __init__(self, model: mtpc.SpecModel, weights: str, spec_tokens: int | str):
        self.engine, self.weights, self.spec_tokens = f"mtpc, {weights}", weights, spec_tokens
        self.run = MtpcServer(model).run


class SyntheticServer(TierServer):
    """A program of several K, or of K = 0, that accepts each draft with one probability.

    Each run starts with a new policy, which may know the costs of steps, or with a fixed K.

    Args:
        model: a compiled model.
        probability: the probability that a draft is accepted if all drafts before it are.
        spec_tokens: K, "auto", or AGAIN.
        known: costs that runs of "auto" have measured, to which this run adds its own.
    """

    def __init__(
        self,
        model: mtpc.SpecModel,
        probability: float,
        spec_tokens: int | str,
        known: dict[Place, CellCosts],
    ):
        super().__init__(model, f"synthetic {probability:g}", spec_tokens)
        self._model, self._serve, self._known = model, self.run, known
        most = model.options.spec_tokens
        self._rates = tuple(probability**count for count in range(1, most + 1))
        self.run = self._run

    def _run(self, arrivals: Sequence[Arrival]) -> Sample:
        model, k = self._model, self.spec_tokens
        if self._rates:
            model.set_synthetic_acceptance(self._rates)
        known = self._known if k == AGAIN else None
        policy = TierPolicy((k,) if isinstance(k, int) else model.options.tiers, known)
        model.engine.runner.tiers = policy
        model.engine.reset_prefix_cache()
        run = self._serve(arrivals)
        if k == AUTO:
            self._known.update(policy.costs())
        return run


@dataclass(frozen=True)
class Row(Counts):
    """The figures of a load: medians over samples.

    Attributes:
        weights: name of the checkpoint.
        load: the arrivals.
        spec_tokens: K, or "auto".
        tokens_per_s: new tokens divided by seconds with work.
        ms_per_token_p50: median over requests, after the first token.
        tokens_by_k: tokens of decode steps of all kept samples, by the step's K.
    """

    weights: str
    load: str
    spec_tokens: int | str
    tokens_per_s: float
    ms_per_token_p50: float
    tokens_by_k: dict[int, int]


def tokens_per_s(sample: Sample) -> float:
    """New tokens divided by seconds with work."""
    if sample.work_s is None:
        raise ValueError("the sample does not say how long there was work")
    return sum(count for trace in sample.traces for _, count in trace) / sample.work_s


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a sampled case."""
    assert isinstance(case.server, TierServer)
    kept = case.kept(max_foreign)
    pace = [[p for p in map(ms_per_token, sample.traces) if p is not None] for sample in kept]
    tokens: Counter[int] = Counter()
    for sample in kept:
        tokens.update(sample.tokens_by_k or {})
    return Row(
        weights=case.server.weights,
        load=str(case.load),
        spec_tokens=case.server.spec_tokens,
        tokens_per_s=median(map(tokens_per_s, kept)),
        ms_per_token_p50=median(percentile(of_sample, 50) for of_sample in pace),
        tokens_by_k=dict(sorted(tokens.items())),
        **case.counts(max_foreign),
    )


def fixed(rows: Sequence[Row], row: Row) -> dict[int | str, float]:
    """Tokens per second by fixed K, for a row's weights and load."""
    return {
        other.spec_tokens: other.tokens_per_s
        for other in rows
        if (other.weights, other.load) == (row.weights, row.load)
        and isinstance(other.spec_tokens, int)
    }


def table(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    columns: Columns[Row] = {
        "weights": lambda row: row.weights,
        "load": lambda row: row.load,
        "K": lambda row: str(row.spec_tokens),
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "of best fixed": lambda r: f"{r.tokens_per_s / max(fixed(rows, r).values()):.2f}",
        "of K=0": lambda row: f"{row.tokens_per_s / fixed(rows, row)[0]:.2f}",
        "ms/token p50": lambda row: f"{row.ms_per_token_p50:.1f}",
        "tokens by K": lambda row: (
            "-" if isinstance(row.spec_tokens, int) else shares(row.tokens_by_k)
        ),
        "samples": sample_counts,
    }
    return Table.of("K by load", columns, rows, NOTES)


def shares(tokens: dict[int, int]) -> str:
    """The cell of shares by K: `0: 75%, 3: 25%`."""
    total = sum(tokens.values())
    return ", ".join(f"{k}: {count / total:.0%}" for k, count in tokens.items())


def servers(args: argparse.Namespace, workdir: Path, tell: Tell) -> Iterator[TierServer]:
    """Both checkpoints, each with drafts fixed at 0 and K, and chosen."""
    for weights in WEIGHTS:
        directory = command.write_mimo(args, workdir, tell, weights == "accepting").directory
        for k in (0, args.spec_tokens, AUTO):
            tell(f"compile {weights} K={k}")
            yield TierServer(_compile(directory, k, args), weights, k)


def _compile(directory: Path, k: Any, args: argparse.Namespace, **more: Any) -> mtpc.SpecModel:
    more |= {"spec_tiers": args.tiers} if k == AUTO else {}
    sizes = dict[str, Any](batch_buckets=args.batch_buckets, max_len=MAX_LEN)
    return mtpc.compile(directory, spec_tokens=k, backend=args.backend, **sizes, **more)


def synthetic_servers(args: argparse.Namespace, workdir: Path, tell: Tell) -> Iterator[TierServer]:
    """The servers for each acceptance: K = 0, every other fixed K, and "auto"."""
    directory, known = command.write_mimo(args, workdir, tell).directory, dict[Place, CellCosts]()
    tell(f"compile K=0 and K={AUTO}")
    nothing = (0.0,) * max(args.tiers)
    plain = _compile(directory, 0, args)
    several = _compile(directory, AUTO, args, synthetic_acceptance_rates=nothing)
    for probability in args.acceptance:
        for fixed in (0, *(k for k in sorted(args.tiers) if k), AUTO, AGAIN):
            yield SyntheticServer(several if fixed else plain, probability, fixed, known)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    loads = [Load(args.rate, args.requests), Load(None, args.requests)]
    with command.working_directory(args.workdir) as workdir:
        make = synthetic_servers if args.acceptance else servers
        engines = list(make(args, workdir, tell))
        cases = [
            Case(load, server)
            for weights in dict.fromkeys(server.weights for server in engines)
            for load in loads
            for server in engines
            if server.weights == weights
        ]
        sample_in_turns(cases, args, tell)
    rows = [summarise(case, args.max_foreign) for case in cases]
    publish("tiers", args, {"rows": [asdict(row) for row in rows]}, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "tiers", __doc__, *command.FILES, "--shape", "--backend", *command.SAMPLING,
        spec_tokens=3, batch_buckets=[1, 2, 4, 8], acceptance=[], repeats=3,
    )  # fmt: skip
    add = parser.add_argument
    add("--tiers", nargs="+", type=int, default=[0, 1, 2, 3], metavar="K", help="what auto has")
    add("--rate", type=float, default=0.3, metavar="R", help="the low load, requests/s")
    add("--requests", type=command.positive, default=24, metavar="N", help="of each load")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
