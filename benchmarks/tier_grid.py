""" "auto" against every fixed K on a grid of loads, simulated without a model.

    python -m benchmarks.tier_grid --processes 2 --out benchmarks/results/paper/tier-grid.json

The real policy chooses K; steps, drafts and arrivals are random (`harness.loads`). It takes about
70 minutes of CPU time. `--every 100` takes every hundredth load. `--short` simulates bursts of
one request per row, with a policy that knows nothing and with one that knows the costs of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.harness import command
from benchmarks.harness.bench import ON_PAPER, Benchmark, Run
from benchmarks.harness.loads import GRID, SHORT, TIERS, Load, Moment, decode, measured
from benchmarks.harness.tables import Record, Row, Table
from mtpc.engine.tiers import TierPolicy

BURSTS, DRAWS, MORE_DRAWS = 12, 3, 12
BEST, FLOOR = 0.98, 0.95
"""The goals of "auto", relative to the best fixed K and to K = 0."""
NEAR = 0.01
"""A load so near to the first goal, on either side, is simulated with more draws."""
COLUMNS = (
    *("loads", "number", "least of best", "5th percentile", "mean", f"at least {BEST}"),
    *("least of K=0", "least of K=0 at any time"),
)
NOTES = (
    "simulated: steps cost what records and formulas say, with noise and outliers.",
    'of best: the time at the best fixed K, 0 among them, over that with "auto": once the seconds '
    "in which there was work, once those that requests took to decode; the lesser of both. Each "
    f"load begins with a policy that knows nothing. Times are means of {DRAWS} draws, or of "
    f"{MORE_DRAWS} for a load within {NEAR} of {BEST}: of which drafts are accepted, of noise, of "
    "arrivals, and of where the drift begins.",
    "at any time: seconds with work, after each 64th of the tokens, from the second on.",
    "drift: memory: what a step reads takes up to a third more or less; all: the whole step does; "
    "abrupt: from one step to the next drafts cost three times as much, later memory half more.",
    "jumps: all texts go from hopeless to easy and back after 400 tokens of all requests; mixed: "
    "every other request is hopeless.",
)


SHORT_COLUMNS = ("loads", "number", "nothing known", "least", "costs known", "least")
SHORT_NOTES = (
    "simulated: bursts of one request of 64 tokens a row, without drift.",
    f"of the best fixed K: its time over that with auto, both means of {BURSTS} bursts; the loads' "
    "mean, and the least.",
    "costs known: from an earlier run on the same machine; of acceptance nothing is known.",
)


class Shares(NamedTuple):
    """The speed of "auto" relative to the best fixed K, to K = 0, and to K = 0 at its worst.

    Times are those of all draws of a load together.
    """

    best: float
    plain: float
    floor: float


def compare(load: Load, policy: type[TierPolicy] = TierPolicy, count: int = DRAWS) -> Shares:
    """Compare "auto" with every fixed K on so many draws of a load."""
    draws = range(count)
    fixed = [decoded(load, draws, lambda tier=tier: tier) for tier in TIERS]  # type: ignore[misc]
    auto = decoded(load, draws, lambda: policy(TIERS))
    best, plain = (
        min(
            min(moments[-1].work for moments in beside) / auto[-1].work,
            min(moments[-1].waited for moments in beside) / auto[-1].waited,
        )
        for beside in (fixed, fixed[:1])
    )
    floors = [plain.work / own.work for plain, own in zip(fixed[0], auto, strict=True)]
    return Shares(best, plain, min(floors[1:]))


def decoded(
    load: Load, draws: Iterable[int], chosen: Callable[[], TierPolicy | int]
) -> list[Moment]:
    """The mean times of a load's draws, each with a policy of its own."""
    found = [decode(replace(load, draw=draw), chosen()) for draw in draws]
    return [Moment(*map(mean, zip(*each, strict=True))) for each in zip(*found, strict=True)]


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of all loads."""
    run.facts["machine"] = ON_PAPER
    make, loads = (short_row, SHORT) if run.args.short else (row, GRID)
    with ProcessPoolExecutor(run.args.processes) as pool:
        yield list(pool.map(make, range(0, len(loads), run.args.every), chunksize=4))


def row(number: int) -> dict[str, Any]:
    """The record's entry of a load."""
    load = GRID[number]
    shares = compare(load)
    if abs(shares.best - BEST) < NEAR:
        shares = compare(load, count=MORE_DRAWS)
    return {
        "costs": load.cost.__name__,
        "batch": load.batch,
        "context": load.context,
        "acceptance": load.chance.__name__,
        "arrivals": "burst" if load.is_burst else "random",
        "drift": load.drift,
        **{name: round(share, 4) for name, share in shares._asdict().items()},
    }


def short_row(number: int) -> dict[str, Any]:
    """The record's entry of a short load, without and with known costs."""
    load = SHORT[number]

    def work(chosen: Callable[[], TierPolicy | int]) -> float:
        return decoded(load, range(1, BURSTS + 1), chosen)[-1].work

    best = min(work(lambda tier=tier: tier) for tier in TIERS)  # type: ignore[misc]
    return {
        "costs": load.cost.__name__,
        "batch": load.batch,
        "acceptance": load.chance.__name__,
        "nothing": round(best / work(lambda: TierPolicy(TIERS)), 4),
        "known": round(best / work(lambda: TierPolicy(TIERS, measured(load.cost))), 4),
    }


def table_of(record: Record) -> Table:
    """A record's table: all loads, and groups of loads with a common property."""
    rows = record["rows"]
    groups = [("all", rows)]
    for name in ("costs", "batch", "context", "acceptance", "arrivals", "drift"):
        for value in dict.fromkeys(row[name] for row in rows if name in row):
            groups.append((f"{name} {value}", [row for row in rows if row[name] == value]))
    if "known" in rows[0]:
        body = [short_cells(*group) for group in groups]
        return Table("K in short bursts, simulated", SHORT_COLUMNS, body, SHORT_NOTES)
    return Table("K by load, simulated", COLUMNS, [cells(*group) for group in groups], NOTES)


def short_cells(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of a row of the table of short bursts."""
    shares = [[row[key] for row in rows] for key in ("nothing", "known")]
    return [name, str(len(rows)), *(f"{of(each):.3f}" for each in shares for of in (mean, min))]


def cells(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of a row of the table."""
    best = sorted(row["best"] for row in rows)
    figures = (best[0], best[len(best) // 20], mean(best))
    usual = sum(share >= BEST for share in best) / len(best)
    return [
        *(name, str(len(rows)), *(f"{figure:.3f}" for figure in figures), f"{usual:.1%}"),
        *(f"{min(row[key] for row in rows):.3f}" for key in ("plain", "floor")),
    ]


BENCHMARK = Benchmark(
    "tier_grid",
    __doc__,
    measure,
    table_of,
    command.RESULTS,
    options={
        "--every": command.NUMBER | dict(default=1, help="take every N-th load"),
        "--processes": command.NUMBER | dict(default=1, help="that share the work"),
        "--short": dict(action="store_true", help="short bursts instead of the grid"),
    },
)
main, table = BENCHMARK.commands(__name__)
