"""From which acceptance K pays, as a picture.

    python -m benchmarks.plot_acceptance benchmarks/results/zen5/acceptance-0.5b.json PICTURE.png

One panel per batch: tokens per second over those of K = 0, by synthetic acceptance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.acceptance import Row, over_plain, pays_from, rows_of
from benchmarks.harness import command
from benchmarks.harness.results import Record

COLOURS = {1: "#9a9a9a", 2: "#57b0a6", 3: "#1f6f8b"}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = command.new_plot_parser("plot_acceptance", __doc__, "acceptance")
    args = parser.parse_args(argv)
    mpl.rcParams["font.size"] = 9
    _figure(json.loads(args.results.read_text())).savefig(args.picture, dpi=150)
    return 0


def _figure(record: Record) -> Figure:
    rows = rows_of(record)
    batches = sorted({row.batch for row in rows})
    figure = Figure(figsize=(3.7 * len(batches), 3.6), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for batch, axes in zip(batches, panels, strict=True):
        _draw([row for row in rows if row.batch == batch], axes)
        axes.set_title(f"batch {batch}")
    panels[0].set_ylabel("tokens/s over K=0")
    machine, versions, told = (record[name] for name in ("machine", "versions", "arguments"))
    figure.suptitle(
        f"From which acceptance drafts pay: {told['shape']} MiMo shape, {machine['cpu']}, "
        f"{machine['threads']} threads, commit {versions['commit']}"
    )
    return figure


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    """One line per K, with a mark where it crosses K = 0."""
    axes.axhline(1, color="#2b2b2b", linewidth=1)
    for k in sorted({row.spec_tokens for row in rows} - {0}):
        line = [row for row in rows if row.spec_tokens == k]
        start = pays_from(rows, line[0])
        name = "never pays" if start is None else f"pays from {start:.0%}"
        places = [100 * (row.synthetic_acceptance or 0) for row in line]
        colour = COLOURS.get(k)
        gains = [over_plain(rows, row) for row in line]
        axes.plot(places, gains, marker="o", color=colour, label=f"K={k}, {name}")
        if start is not None:
            axes.plot([100 * start], [1], marker="D", color=colour)
    axes.set_xlabel("SYNTHETIC acceptance of a draft, %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
