"""Draws what drafts gain on a real model's edits and prose, and how a drafter learned to draft.

python -m benchmarks.plot_drafts COPIES.json PICTURE.png --training TUNE_HEAD.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.copies import MTPC, PLAIN, Sample
from benchmarks.harness import command
from benchmarks.harness.results import Record

COLOURS = {"edits": "#1f6f8b", "prose": "#c8553d"}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = command.new_plot_parser("plot_drafts", __doc__, "copies")
    parser.add_argument("--training", type=Path, metavar="FILE", help="tune_head's record")
    args: argparse.Namespace = parser.parse_args(argv)
    mpl.rcParams["font.size"] = 9
    record = json.loads(args.results.read_text())
    panels = 2 if args.training else 1
    figure = Figure(figsize=(0.8 + 5.2 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_speeds(record, axes[0])
    if args.training:
        _draw_learning(json.loads(args.training.read_text()), axes[1])
    machine, versions = record["machine"], record["versions"]
    figure.suptitle(
        f"Drafts on a real model: {machine['cpu']}, {machine['threads']} threads, "
        f"commit {versions['commit']}"
    )
    figure.savefig(args.picture, dpi=150)
    return 0


def speeds(record: Record) -> dict[str, dict[str, float]]:
    """Label of an engine's setting -> kind of text -> tokens a second."""
    tokens: dict[str, dict[str, list[float]]] = {}
    for sample in (Sample(**row) for row in record["rows"]):
        draft = "plain" if sample.setting == PLAIN else sample.draft
        label = f"{sample.engine} {draft}"
        if sample.engine == MTPC and sample.setting != PLAIN:
            label += f" K={sample.setting}"
        sums = tokens.setdefault(label, {}).setdefault(sample.text, [0.0, 0.0])
        sums[0] += sample.tokens
        sums[1] += sample.seconds
    return {
        label: {text: count / seconds for text, (count, seconds) in kinds.items()}
        for label, kinds in tokens.items()
    }


def _draw_speeds(record: Record, axes: Axes) -> None:
    """One pair of bars for each setting of each engine."""
    found = speeds(record)
    for shift, (text, colour) in enumerate(COLOURS.items()):
        values = [kinds.get(text, 0.0) for kinds in found.values()]
        places = [place + 0.4 * shift for place in range(len(found))]
        bars = axes.barh(places, values, 0.38, color=colour, label=text)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_yticks([place + 0.2 for place in range(len(found))], list(found))
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, one request")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_learning(record: Record, axes: Axes) -> None:
    """Share of right drafts on held-out text by the minutes of training, a line for each draft."""
    points = record["progress"]["held_out"]
    minutes = [point["seconds"] / 60 for point in points]
    for depth in range(len(points[0]["right"])):
        right = [100 * point["right"][depth] for point in points]
        axes.plot(
            minutes, right, color="#1f6f8b", alpha=1 - 0.25 * depth, label=f"draft {depth + 1}"
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("% right of held-out positions, with those before them")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
