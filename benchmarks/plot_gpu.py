"""Draws a GPU's record, for `benchmarks.plot`: steps by the time of their weights; attention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.results import Record

SHADES = {"second": "#c3d5dc", "third": "#7fa9b8", "seventh": "#1f6f8b"}
LABELS = {
    "second": "first kernels",
    "third": "kernels for few rows",
    "seventh": "launches begin early",
}
LIMIT = "#2b2b2b"

Row = Mapping[str, Any]


def figure(record: Record) -> Figure:
    """The picture."""
    drawn = Figure(figsize=(11, 3.8), layout="constrained")
    steps, attention = drawn.subplots(1, 2)
    _draw_steps(record["rows"], steps)
    _draw_attention(record["rows"], attention)
    machine, versions = record["machine"], record["versions"]
    drawn.suptitle(f"{machine['gpu']}, torch {versions['torch']}, commit {versions['commit']}")
    return drawn


def _draw_steps(rows: Sequence[Row], axes: Axes) -> None:
    """Draw the least device time of each shape's plain step, by run."""
    plain = [
        row for row in rows
        if row["part"] in ("speed", "profile") and row["spec_tokens"] == 0 and row["batch"] == 1
        and "ms_device" in row and "," not in row["shape"]
    ]  # fmt: skip
    shapes = list(dict.fromkeys(row["shape"] for row in plain))
    for number, (run, colour) in enumerate(SHADES.items()):
        for place, shape in enumerate(shapes):
            of_case = [r for r in plain if (r["shape"], r["run"]) == (shape, run)]
            if of_case:
                best = min(of_case, key=lambda row: float(row["ms_device"]))
                at = place + 0.28 * (number - 1)
                seen = axes.get_legend_handles_labels()[1]
                label = None if LABELS[run] in seen else LABELS[run]
                axes.bar(at, best["ms_device"], 0.26, color=colour, label=label)
                floor = best["step_bytes"] / (1e6 * best["copy_gb_s"])
                axes.hlines(floor, at - 0.13, at + 0.13, color=LIMIT)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylabel("ms on the device (line: its weights' bytes)")
    axes.set_title("A decode step of one request, K = 0")
    axes.legend()


def _draw_attention(rows: Sequence[Row], axes: Axes) -> None:
    """Draw attention's share of the copy bandwidth by length, in the last run that has it."""
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        sizes = re.search(r"batch (\d+), (\d+) tokens", row["shape"])
        if row["part"] == "time" and sizes and "batch_invariant" not in row["engine"]:
            rows_each = int(row["batch"]) // int(sizes[1])
            name = f"{row['engine']}, {sizes[1]} x {rows_each} rows"
            points = runs.setdefault(row["run"], {}).setdefault(name, [])
            points.append((int(sizes[2]), 100 * row["of_bandwidth"]))
    lines = runs[[*runs][-1]]
    for name, points in lines.items():
        style = "--" if name.startswith("latent") else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("% of the copy bandwidth")
    axes.set_title("Attention alone")
    axes.legend(fontsize=7)
