"""Draws a record: `FIGURES` has a function for each benchmark whose records have a picture.

python -m benchmarks.plot benchmarks/results/xeon-amx/acceptance.json PICTURE.png
python -m benchmarks.plot COPIES.json PICTURE.png --training TUNE_HEAD.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import acceptance, copies
from benchmarks.harness import command
from benchmarks.harness.tables import Record, Row

BLUE, RED, BLACK = "#1f6f8b", "#c8553d", "#2b2b2b"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = command.new_parser("plot", __doc__)
    parser.add_argument("results", type=Path, help="JSON that a benchmark wrote")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    help_ = "tune_head's record, beside one of copies"
    parser.add_argument("--training", type=Path, metavar="FILE", help=help_)
    args = parser.parse_args(argv)
    record = json.loads(args.results.read_text())
    if record["benchmark"] not in FIGURES:
        parser.error(f"records of {record['benchmark']} have no picture, only {[*FIGURES]} have")
    mpl.rcParams["font.size"] = 9
    FIGURES[record["benchmark"]](record, args).savefig(args.picture, dpi=150)
    return 0


def _panels(rows: int, columns: int, size: tuple[float, float], title: str, **more: Any) -> Any:
    """A figure, and its axes [rows, columns]."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _values(rows: Sequence[Any], name: str) -> list[Any]:
    """The different values of a column, in order."""
    return list(dict.fromkeys(row[name] for row in rows))


def _measured_on(record: Record) -> str:
    """What stands above a picture: processor or GPU, threads and versions."""
    machine, versions = record["machine"], record["versions"]
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    where = machine.get("gpu") or machine["cpu"] + threads
    return f"{where}, torch {versions['torch']}, commit {versions['commit']}"


BY_BITS = {
    "bfloat16 weights": ("mtpc", "vLLM", "llama.cpp BF16"),
    "4-bit weights": ("mtpc int4-g32", "llama.cpp Q4_0"),
}
"""Row of panels of `_acceptance` -> its engines."""


def _acceptance(record: Record, args: argparse.Namespace) -> Figure:
    """Tokens per second by acceptance length, of mtpc and other engines, by bits and batch."""
    rows = acceptance.rows_of(record)
    batches, engines = sorted({row["batch"] for row in rows}), {row["engine"] for row in rows}
    kinds = [kind for kind, those in BY_BITS.items() if engines & set(those)]
    of = f"Tokens a second by acceptance length: {record['arguments']['shape']} MiMo shape"
    size = (5.2 * len(batches), 0.6 + 4.2 * len(kinds))
    figure, panels = _panels(len(kinds), len(batches), size, f"{of}, {_measured_on(record)}")
    for kind, line in zip(kinds, panels, strict=True):
        for batch, axes in zip(batches, line, strict=True):
            shown = [r for r in rows if r["batch"] == batch and r["engine"] in BY_BITS[kind]]
            _draw_lengths(shown, axes)
            axes.set_title(f"{kind}, batch {batch}")
        line[0].set_ylabel("tokens/s")
    for axes in panels[-1]:
        axes.set_xlabel("tokens a step (SYNTHETIC acceptance)")
    return figure


def _draw_lengths(rows: Sequence[Row], axes: Axes) -> None:
    """Draw one line for each engine and K. Marks are measurements of mtpc. A step of K drafts costs
    the same at any acceptance, so another engine's line follows from one measured step."""
    longest = 1 + max(row["spec_tokens"] for row in rows)
    for engine, k in dict.fromkeys((row["engine"], row["spec_tokens"]) for row in rows):
        line = [row for row in rows if (row["engine"], row["spec_tokens"]) == (engine, k)]
        places: list[float] = [1, k + 1 if k else longest]
        per_token = line[0]["tokens_per_s"] / line[0]["tokens_per_step"]
        speeds = [per_token * (length if k else 1) for length in places]
        label, mark = f"{engine} K={k}", None
        if line[0]["synthetic_acceptance"] is not None:
            places = [row["tokens_per_step"] for row in line]
            speeds = [row["tokens_per_s"] for row in line]
            pays = acceptance.share(acceptance.pays_from(rows, line[0]))
            label, mark = f"{label}, pays from {pays}", "o"
        colour = {"mtpc": BLUE, "vLLM": RED, "llama.cpp": "#7a7a7a"}[engine.split()[0]]
        style = (":", "--", "-.", "-")[min(k, 3)]
        axes.plot(places, speeds, style, marker=mark, markersize=3, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, longest + 1))
    below: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    axes.legend(frameon=False, fontsize=6.5, columnspacing=1, **below)


RUNS = {
    "second": ("first kernels", "#c3d5dc"),
    "third": ("kernels for few rows", "#7fa9b8"),
    "seventh": ("launches begin early", BLUE),
}
"""Runs of the H100's record of which `_draw_gpu_steps` shows the steps."""


def _gpu(record: Record, args: argparse.Namespace) -> Figure:
    """Steps by the time of their weights; attention by length."""
    figure, ((steps, attention),) = _panels(1, 2, (11, 3.8), _measured_on(record))
    _draw_gpu_steps(record["rows"], steps)
    _draw_gpu_attention(record["rows"], attention)
    return figure


def _draw_gpu_steps(rows: Sequence[Row], axes: Axes) -> None:
    """Draw the least device time of each shape's plain step, by run."""
    plain = [
        row for row in rows
        if row["part"] in ("speed", "profile") and row["spec_tokens"] == 0 and row["batch"] == 1
        and "ms_device" in row and "," not in row["shape"]
    ]  # fmt: skip
    shapes = _values(plain, "shape")
    for number, (run, (label, colour)) in enumerate(RUNS.items()):
        for place, shape in enumerate(shapes):
            of_case = [r for r in plain if (r["shape"], r["run"]) == (shape, run)]
            if of_case:
                best = min(of_case, key=lambda row: float(row["ms_device"]))
                at = place + 0.28 * (number - 1)
                seen = axes.get_legend_handles_labels()[1]
                name = None if label in seen else label
                axes.bar(at, best["ms_device"], 0.26, color=colour, label=name)
                floor = best["step_bytes"] / (1e6 * best["copy_gb_s"])
                axes.hlines(floor, at - 0.13, at + 0.13, color=BLACK)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylabel("ms on the device (line: its weights' bytes)")
    axes.set_title("A decode step of one request, K = 0")
    axes.legend()


def _draw_gpu_attention(rows: Sequence[Row], axes: Axes) -> None:
    """Draw attention's share of the copy bandwidth by length, in the last run that has it."""
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        sizes = re.search(r"batch (\d+), (\d+) tokens", row["shape"])
        if row["part"] == "time" and sizes and "batch_invariant" not in row["engine"]:
            name = f"{row['engine']}, {sizes[1]} x {int(row['batch']) // int(sizes[1])} rows"
            points = runs.setdefault(row["run"], {}).setdefault(name, [])
            points.append((int(sizes[2]), 100 * row["of_bandwidth"]))
    for name, points in runs[[*runs][-1]].items():
        style = "--" if name.startswith("latent") else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("% of the copy bandwidth")
    axes.set_title("Attention alone")
    axes.legend(fontsize=7)


def speeds(record: Record) -> dict[str, dict[str, float]]:
    """Label of a setting of `benchmarks.copies` -> kind of text -> tokens a second."""
    sums: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        engine, setting = row["engine"], row["setting"]
        draft = "plain" if setting == copies.PLAIN else row["draft"]
        has_k = engine == copies.MTPC and setting != copies.PLAIN
        label = f"{engine} {draft}{f' K={setting}' * has_k}"
        total = sums.setdefault(label, {}).setdefault(row["text"], np.zeros(2))
        total += row["tokens"], copies.middle(row)
    return {
        label: {text: float(tokens / seconds) for text, (tokens, seconds) in kinds.items()}
        for label, kinds in sums.items()
    }


def _copies(record: Record, args: argparse.Namespace) -> Figure:
    """What drafts gain on edits and prose; with `--training`, how a drafter learned to draft."""
    count, found, title = 1 + bool(args.training), speeds(record), "Drafts on a real model"
    title = f"{title}: {_measured_on(record)}"
    figure, ((axes, *others),) = _panels(1, count, (0.8 + 5.2 * count, 4.4), title)
    for shift, (text, colour) in enumerate((("edits", BLUE), ("prose", RED))):
        values = [kinds.get(text, 0.0) for kinds in found.values()]
        places = [place + 0.4 * shift for place in range(len(found))]
        bars = axes.barh(places, values, 0.38, color=colour, label=text)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_yticks([place + 0.2 for place in range(len(found))], list(found))
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, one request")
    axes.legend(frameon=False)
    for other in others:
        _draw_learning(json.loads(args.training.read_text()), other)
    return figure


def _draw_learning(record: Record, axes: Axes) -> None:
    """Draw the share of right drafts on held-out text by minutes, one line for each draft."""
    points = record["progress"]["held_out"]
    minutes = [point["seconds"] / 60 for point in points]
    for depth, right in enumerate(zip(*(point["right"] for point in points), strict=True)):
        shares, alpha = [100 * share for share in right], 1 - 0.25 * depth
        axes.plot(minutes, shares, color=BLUE, alpha=alpha, label=f"draft {depth + 1}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("% right of held-out positions, with those before them")
    axes.legend(frameon=False)


FIGURES: dict[str, Callable[[Record, argparse.Namespace], Figure]] = {
    "acceptance": _acceptance,
    "gpu_record": _gpu,
    "copies": _copies,
}
"""A record's benchmark -> what draws it."""

if __name__ == "__main__":
    sys.exit(main())
