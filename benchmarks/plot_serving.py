"""Draws a record of the serving benchmark, for `benchmarks.plot`.

One column of panels per load, and one row per figure: tokens per second, the time to the first
token, and the gap between outputs, the two latter as the median and the 99th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.results import Record
from benchmarks.plot import COLOURS, Row, finish, measured_on

LATENCIES = (
    ("TTFT, s", "ttft_p50_s", "ttft_p99_s"),
    ("gap, ms", "gap_p50_ms", "gap_p99_ms"),
)


def figure(record: Record) -> Figure:
    """The picture."""
    rows: list[Row] = record["rows"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    drawn = Figure(figsize=(3.6 * len(loads), 9), layout="constrained")
    axes = drawn.subplots(1 + len(LATENCIES), len(loads), squeeze=False)
    for column, load in enumerate(loads):
        of_load = [row for row in rows if row["load"] == load]
        _draw_speed(axes[0, column], of_load, load)
        for panel, (title, *names) in zip(axes[1:, column], LATENCIES, strict=True):
            _draw_latency(panel, of_load, title, names)
    told = record["arguments"]
    of = f"{told['shape']} MiMo shape, {told['weights']} weights"
    drawn.suptitle(f"{of}, {measured_on(record)}")
    return drawn


def _draw_speed(axes: Axes, rows: Sequence[Row], load: str) -> None:
    axes.set_title(f"{load}: tokens/s")
    values = [row["tokens_per_s"] for row in rows]
    bars = axes.bar(range(len(rows)), values, color=[COLOURS[row["engine"]] for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    finish(axes, rows)


def _draw_latency(axes: Axes, rows: Sequence[Row], title: str, names: Sequence[str]) -> None:
    """Draw the 99th percentile as a pale bar behind the median."""
    axes.set_title(f"{title}: median, and p99 (pale)")
    colours = [COLOURS[row["engine"]] for row in rows]
    for name, alpha in zip(reversed(names), (0.4, 1.0), strict=True):
        bars = axes.bar(range(len(rows)), [row[name] for row in rows], color=colours, alpha=alpha)
        if alpha < 1:
            axes.bar_label(bars, fmt="%.3g", padding=2)
    finish(axes, rows)
