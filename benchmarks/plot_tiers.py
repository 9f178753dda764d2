"""Draws "auto" and every fixed K by load, for `benchmarks.plot`.

Of a record of `benchmarks.tiers`: one panel per load; bars are tokens per second of work, relative
to K = 0 with the same weights. Of one of `benchmarks.tier_grid`: one panel per machine; each load
is a dot, the speed of "auto" relative to the best fixed K and to K = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.results import Record
from benchmarks.plot import measured_on
from benchmarks.tier_grid import BEST
from benchmarks.tiers import AUTO, Row, fixed

AUTO_COLOUR, SHADES = "#c8553d", ("#b9cdd4", "#8fb2bf", "#5f93a6", "#1f6f8b")


def figure(record: Record) -> Figure:
    """The picture."""
    return _grid(record) if record["benchmark"] == "tier_grid" else _loads(record)


def _grid(record: Record) -> Figure:
    machines = list(dict.fromkeys(row["costs"] for row in record["rows"]))
    figure = Figure(figsize=(3.4 * len(machines), 5.4), layout="constrained")
    panels = figure.subplots(2, len(machines), sharex=True, sharey="row", squeeze=False)
    for machine, column in zip(machines, panels.T, strict=True):
        rows = [row for row in record["rows"] if row["costs"] == machine]
        for axes, key in zip(column, ("best", "plain"), strict=True):
            _draw_dots(rows, key, axes)
        column[0].set_title(f"costs: {machine}")
        column[1].set_xlabel("acceptance")
    panels[0, 0].set_ylabel("speed over the best fixed K")
    panels[1, 0].set_ylabel("speed over K = 0")
    panels[0, 0].legend(frameon=False, fontsize=7, title="batch", ncols=2)
    commit = record["versions"]["commit"]
    figure.suptitle(f'"auto" on {len(record["rows"])} simulated loads, commit {commit}')
    return figure


def _draw_dots(rows: Sequence[dict[str, Any]], key: str, axes: Axes) -> None:
    chances = list(dict.fromkeys(row["acceptance"] for row in rows))
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for number, batch in enumerate(batches):
        shown = [row for row in rows if row["batch"] == batch]
        aside = 0.8 * (number + 0.5) / len(batches) - 0.4
        axes.plot(
            [chances.index(row["acceptance"]) + aside for row in shown],
            [row[key] for row in shown],
            "o",
            markersize=2,
            color=SHADES[number % len(SHADES)],
            label=str(batch),
        )
    axes.axhline(BEST if key == "best" else 1, color=AUTO_COLOUR, linewidth=0.6)
    axes.set_xticks(range(len(chances)), chances, rotation=45)
    axes.spines[["top", "right"]].set_visible(False)


def _loads(record: Record) -> Figure:
    rows = [Row(**row) for row in record["rows"]]
    loads = list(dict.fromkeys(row.load for row in rows))
    figure = Figure(figsize=(5.2 * len(loads), 3.6), layout="constrained")
    for load, axes in zip(loads, figure.subplots(1, len(loads), squeeze=False)[0], strict=True):
        _draw([row for row in rows if row.load == load], axes)
        axes.set_title(load)
        axes.set_ylabel("tokens/s over those of K = 0")
    figure.suptitle(f"{record['arguments']['shape']} MiMo shape, {measured_on(record)}")
    return figure


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    weights = list(dict.fromkeys(row.weights for row in rows))
    counts = list(dict.fromkeys(row.spec_tokens for row in rows))
    width = 0.8 / len(counts)
    for number, k in enumerate(counts):
        shown = [row for row in rows if row.spec_tokens == k]
        places = [weights.index(row.weights) + (number + 0.5) * width - 0.4 for row in shown]
        heights = [row.tokens_per_s / fixed(rows, row)[0] for row in shown]
        colour = AUTO_COLOUR if k == AUTO else SHADES[min(number, len(SHADES) - 1)]
        axes.bar(places, heights, width, color=colour, label=str(k) if k == AUTO else f"K = {k}")
    axes.axhline(1, color="#2b2b2b", linewidth=0.6)
    axes.set_xticks(range(len(weights)), weights)
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
