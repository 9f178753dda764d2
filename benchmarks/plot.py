"""Draws a record of `benchmarks.decode`, `serving`, `acceptance`, `tiers`, `tier_grid` or `gpu`.

    python -m benchmarks.plot benchmarks/results/xeon-amx/decode-0.5b.json PICTURE.png

Of `decode`, one row of panels per batch: tokens per second, and milliseconds per step with the part
that reading the step's weights would take at the bandwidth measured with each sample. The modules
`plot_NAME` say what they draw of the others.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import command
from benchmarks.harness.results import Record

COLOURS = {
    "mtpc": "#1f6f8b",
    "mtpc, int8 drafts": "#57b0a6",
    "vLLM": "#d98e32",
    "transformers": "#9a9a9a",
}
LIMIT = "#2b2b2b"

MODULES = {
    "serving": "plot_serving",
    "acceptance": "plot_acceptance",
    "tiers": "plot_tiers",
    "tier_grid": "plot_tiers",
    "gpu_record": "plot_gpu",
}
"""A record's benchmark -> the module whose `figure` draws it, where that is not this one."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = command.new_plot_parser("plot", __doc__, "NAME")
    parser.add_argument("--model", default="mimo", help="which model's rows, of decode")
    args = parser.parse_args(argv)
    record = json.loads(args.results.read_text())
    mpl.rcParams["font.size"] = 9
    module = MODULES.get(record["benchmark"])
    if module is not None:
        picture = importlib.import_module(f"benchmarks.{module}").figure(record)
    elif any(row["model"] == args.model for row in record["rows"]):
        picture = _figure(record, args.model)
    else:
        parser.error(f"{args.results} has no rows of {args.model}")
    picture.savefig(args.picture, dpi=150)
    return 0


def measured_on(record: Record) -> str:
    """What stands above a picture: processor, threads and versions."""
    machine, versions = record["machine"], record["versions"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
        f"commit {versions['commit']}"
    )


def _figure(record: Record, model: str) -> Figure:
    rows = [row for row in record["rows"] if row["model"] == model]
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(11, 3.6 * len(batches)), layout="constrained")
    axes = figure.subplots(len(batches), 2, squeeze=False)
    for batch, (speed, step) in zip(batches, axes, strict=True):
        of_batch = [row for row in rows if row["batch"] == batch]
        weights = {row["weights"] for row in of_batch}
        fastest = "accepting" if "accepting" in weights else "random"
        _draw_speed(speed, [row for row in of_batch if row["weights"] == fastest], batch)
        _draw_steps(step, [row for row in of_batch if row["weights"] == "random"], batch)
    figure.suptitle(f"{model}, {measured_on(record)}")
    return figure


def _draw_speed(axes: Axes, rows: list[Row], batch: int) -> None:
    """Draw tokens per second; with accepting weights, if they were run."""
    accepted = any(row["weights"] == "accepting" for row in rows)
    kind = "every draft accepted" if accepted else "hardly a draft accepted"
    axes.set_title(f"batch {batch}: tokens/s, {kind}")
    values = [row["tokens_per_s"] for row in rows]
    bars = axes.bar(range(len(rows)), values, color=[COLOURS[row["engine"]] for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    finish(axes, rows)


def _draw_steps(axes: Axes, rows: list[Row], batch: int) -> None:
    """Draw milliseconds per step with random weights: the cost of speculation."""
    axes.set_title(f"batch {batch}: ms per step, and its memory limit")
    values = [row["ms_per_step"] for row in rows]
    bars = axes.bar(range(len(rows)), values, color=[COLOURS[row["engine"]] for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    for index, row in enumerate(rows):
        limit = row["efficiency"] * row["ms_per_step"]
        axes.hlines(limit, index - 0.4, index + 0.4, color=LIMIT, linewidth=2)
    finish(axes, rows)


def finish(axes: Axes, rows: Sequence[Row]) -> None:
    """Label the bars with engine and K."""
    labels = [f"{row['engine']}\nK={row['spec_tokens']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=45, ha="right")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
