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

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mtpc
from benchmarks.harness import command
from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.rounds import medians
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields, over
from benchmarks.serving import MAX_LEN, Load, MtpcServer, load_cases, median_pace
from mtpc.engine.estimates import CellCosts
from mtpc.engine.tiers import Place, TierPolicy

WEIGHTS = ("accepting", "random")
AUTO, AGAIN = "auto", "auto, costs known"


class SyntheticServer(MtpcServer):
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
        super().__init__(model, weights=f"synthetic {probability:g}", spec_tokens=spec_tokens)
        self._model, self._known = model, known
        most = model.options.spec_tokens
        self._rates = tuple(probability**count for count in range(1, most + 1))

    def run(self, arrivals: Sequence[Arrival]) -> Row:
        """Serve them."""
        model, k = self._model, self.row["spec_tokens"]
        if self._rates:
            model.set_synthetic_acceptance(self._rates)
        known = self._known if k == AGAIN else None
        policy = TierPolicy((k,) if isinstance(k, int) else model.options.tiers, known)
        model.engine.runner.tiers = policy
        model.engine.reset_prefix_cache()
        found = super().run(arrivals)
        if k == AUTO:
            self._known.update(policy.costs())
        return found


def figures(at_s: Sequence[float], found: Row) -> Row:
    """Of a sample: new tokens divided by seconds with work, and the pace of requests."""
    traces = found["traces"]
    tokens = sum(count for trace in traces for _, count in trace)
    return dict(tokens_per_s=tokens / found["work_s"], ms_per_token_p50=median_pace(traces))


def summary(samples: Sequence[Row]) -> Row:
    """Medians, and tokens of decode steps of all samples by the step's K."""
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens.update(sample["tokens_by_k"])
    return {**medians(samples), "tokens_by_k": dict(sorted(tokens.items()))}


def fixed(row: Row, rows: Sequence[Row]) -> dict[int, float]:
    """Tokens per second by fixed K, for a row's weights and load."""
    return {
        other["spec_tokens"]: other["tokens_per_s"]
        for other in rows
        if (other["weights"], other["load"]) == (row["weights"], row["load"])
        and isinstance(other["spec_tokens"], int)
    }


def _of_best(row: Row, rows: Sequence[Row]) -> float:
    return float(row["tokens_per_s"] / max(fixed(row, rows).values()))


def _shares(row: Row, rows: Sequence[Row]) -> str | None:
    """Shares by K: `0: 75%, 3: 25%`."""
    if isinstance(row["spec_tokens"], int):
        return None
    total = sum(row["tokens_by_k"].values())
    return ", ".join(f"{k}: {count / total:.0%}" for k, count in row["tokens_by_k"].items())


FORM = TableForm(
    "K by load",
    (
        *fields("weights, load, K=spec_tokens"),
        Column(
            "tokens/s", "tokens_per_s", ".1f",
            "all new tokens, over the seconds in which there was work: at a low load most are "
            "spent waiting for requests.",
        ),
        Column(
            "of best fixed", _of_best, ".2f",
            "over the tokens/s of the best fixed K, for the same weights and load.",
        ),
        Column("of K=0", over("tokens_per_s", ("weights", "load"), spec_tokens=0), ".2f"),
        Column("ms/token p50", "ms_per_token_p50", ".1f"),
        Column(
            "tokens by K", _shares, "",
            "where the engine chooses, the share of tokens by the K of their decode step; each "
            "request's first token comes with its prompt, and is not among them.",
        ),
        SAMPLES,
    ),
    (
        "Samples of auto have what it costs to learn; with synthetic acceptance, each one all of "
        "it. 'costs known' begins with the costs that the samples of auto before it have measured, "
        "as a second start does, and learns acceptance.",
    ),
)  # fmt: skip


def measure(run: Run) -> Iterator[list[Row]]:
    """The servers of each kind of weights, on a low load and a burst."""
    loads = [Load(run.args.rate, run.args.requests), Load(None, run.args.requests)]
    servers = list(_synthetic(run) if run.args.acceptance else _trained(run))
    cases = [
        case
        for weights in dict.fromkeys(server.row["weights"] for server in servers)
        for case in load_cases(
            loads, [s for s in servers if s.row["weights"] == weights], run, figures, summary
        )
    ]
    yield run.sample(cases)


def _trained(run: Run) -> Iterator[MtpcServer]:
    """Both checkpoints, each with drafts fixed at 0 and K, and chosen."""
    for weights in WEIGHTS:
        directory = run.write_mimo(weights == "accepting").directory
        for k in (0, run.args.spec_tokens, AUTO):
            run.tell(f"compile {weights} K={k}")
            yield MtpcServer(_compile(directory, k, run), weights=weights, spec_tokens=k)


def _compile(directory: Path, k: Any, run: Run, **more: Any) -> mtpc.SpecModel:
    more |= {"spec_tiers": run.args.tiers} if k == AUTO else {}
    sizes = dict[str, Any](batch_buckets=run.args.batch_buckets, max_len=MAX_LEN)
    return mtpc.compile(directory, spec_tokens=k, backend=run.args.backend, **sizes, **more)


def _synthetic(run: Run) -> Iterator[MtpcServer]:
    """The servers for each acceptance: K = 0, every other fixed K, and "auto"."""
    directory, known = run.write_mimo().directory, dict[Place, CellCosts]()
    run.tell(f"compile K=0 and K={AUTO}")
    plain, tiers = _compile(directory, 0, run), run.args.tiers
    several = _compile(directory, AUTO, run, synthetic_acceptance_rates=(0.0,) * max(tiers))
    for probability in run.args.acceptance:
        for k in (0, *(k for k in sorted(tiers) if k), AUTO, AGAIN):
            yield SyntheticServer(several if k else plain, probability, k, known)


BENCHMARK = Benchmark(
    "tiers",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--backend", *command.SAMPLING),
    dict(spec_tokens=3, batch_buckets=[1, 2, 4, 8], acceptance=[], repeats=3),
    {
        "--tiers": dict(
            nargs="+", type=int, default=[0, 1, 2, 3], metavar="K", help="what auto has"
        ),
        "--rate": dict(type=float, default=0.3, metavar="R", help="the low load, requests/s"),
        "--requests": command.NUMBER | dict(default=24, help="of each load"),
    },
)
main, table = BENCHMARK.commands(__name__)
