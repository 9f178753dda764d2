"""Draws a record: `FIGURES` has a function for each benchmark whose records have a picture.

python -m benchmarks.plot benchmarks/results/xeon-amx/decode-0.5b.json PICTURE.png
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

from benchmarks import acceptance, copies, soak, tiers
from benchmarks.harness import command
from benchmarks.harness.results import Record
from benchmarks.tier_grid import BEST

BLUE, RED, ORANGE, GREEN, GREY, BLACK = (
    "#1f6f8b", "#c8553d", "#d98e32", "#57b0a6", "#9a9a9a", "#2b2b2b",
)  # fmt: skip
BLUES = ("#b9cdd4", "#8fb2bf", "#5f93a6", BLUE)
ENGINES = {"mtpc": BLUE, "mtpc, int8 drafts": GREEN, "vLLM": ORANGE, "transformers": GREY}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = command.new_parser("plot", __doc__)
    parser.add_argument("results", type=Path, help="JSON that a benchmark wrote")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--model", default="mimo", help="which model's rows, of decode")
    help_ = "tune_head's record, beside one of copies"
    parser.add_argument("--training", type=Path, metavar="FILE", help=help_)
    args = parser.parse_args(argv)
    record = json.loads(args.results.read_text())
    if record["benchmark"] not in FIGURES:
        parser.error(f"records of {record['benchmark']} have no picture, only {[*FIGURES]} have")
    if record["benchmark"] == "decode":
        record["rows"] = [row for row in record["rows"] if row["model"] == args.model]
    if not record["rows"]:
        parser.error(f"{args.results} has no rows of {args.model}")
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


def _bars(axes: Axes, rows: Sequence[Row], title: str, name: str, pale: str | None = None) -> None:
    """One bar for each engine and K; another value of the rows pale behind it, with its number."""
    axes.set_title(title)
    colours = [ENGINES.get(row["engine"], GREY) for row in rows]
    for values, alpha in ((pale, 0.4), (name, 1.0)):
        if values is not None:
            bars = axes.bar(range(len(rows)), [row[values] for row in rows], color=colours,
                            alpha=alpha)  # fmt: skip
            if values == (pale or name):
                axes.bar_label(bars, fmt="%.3g" if pale else "%.0f", padding=2)
    labels = [f"{row['engine']}\nK={row['spec_tokens']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=45, ha="right")
    axes.margins(y=0.15)


def _decode(record: Record, args: argparse.Namespace) -> Figure:
    """For each batch tokens per second, and milliseconds per step with random weights, with the
    part that reading the step's weights would take at the bandwidth measured with each sample."""
    batches = sorted(_values(record["rows"], "batch"))
    size, title = (11, 3.6 * len(batches)), f"{args.model}, {_measured_on(record)}"
    figure, panels = _panels(len(batches), 2, size, title)
    for batch, (speed, step) in zip(batches, panels, strict=True):
        of_batch = [row for row in record["rows"] if row["batch"] == batch]
        random, accepting = (
            [row for row in of_batch if row["weights"] == w] for w in ("random", "accepting")
        )
        kind = "every draft accepted" if accepting else "hardly a draft accepted"
        _bars(speed, accepting or random, f"batch {batch}: tokens/s, {kind}", "tokens_per_s")
        _bars(step, random, f"batch {batch}: ms per step, and its memory limit", "ms_per_step")
        for index, row in enumerate(random):
            limit = row["efficiency"] * row["ms_per_step"]
            step.hlines(limit, index - 0.4, index + 0.4, color=BLACK, linewidth=2)
    return figure


def _serving(record: Record, args: argparse.Namespace) -> Figure:
    """One column of panels for each load: tokens per second, and latencies."""
    rows, told = record["rows"], record["arguments"]
    loads = _values(rows, "load")
    of = f"{told['shape']} MiMo shape, {told['weights']} weights"
    figure, panels = _panels(3, len(loads), (3.6 * len(loads), 9), f"{of}, {_measured_on(record)}")
    for load, (speed, first, gap) in zip(loads, panels.T, strict=True):
        shown, how = [row for row in rows if row["load"] == load], "median, and p99 (pale)"
        _bars(speed, shown, f"{load}: tokens/s", "tokens_per_s")
        _bars(first, shown, f"TTFT, s: {how}", "ttft_p50_s", "ttft_p99_s")
        _bars(gap, shown, f"gap, ms: {how}", "gap_p50_ms", "gap_p99_ms")
    return figure


BY_BITS = {
    "bfloat16 weights": ("mtpc", "vLLM", "llama.cpp BF16"),
    "4-bit weights": ("mtpc int4-g32", "llama.cpp Q4_0"),
}
"""Row of panels of `_acceptance` -> its engines."""


def _acceptance(record: Record, args: argparse.Namespace) -> Figure:
    """Tokens per second by acceptance length, of mtpc and other engines, by bits and batch."""
    rows = acceptance.rows_of(record)
    batches, engines = sorted({row.batch for row in rows}), {row.engine for row in rows}
    kinds = [kind for kind, those in BY_BITS.items() if engines & set(those)]
    of = f"Tokens a second by acceptance length: {record['arguments']['shape']} MiMo shape"
    size = (5.2 * len(batches), 0.6 + 4.2 * len(kinds))
    figure, panels = _panels(len(kinds), len(batches), size, f"{of}, {_measured_on(record)}")
    for kind, line in zip(kinds, panels, strict=True):
        for batch, axes in zip(batches, line, strict=True):
            shown = [r for r in rows if r.batch == batch and r.engine in BY_BITS[kind]]
            _draw_lengths(shown, axes)
            axes.set_title(f"{kind}, batch {batch}")
        line[0].set_ylabel("tokens/s")
    for axes in panels[-1]:
        axes.set_xlabel("tokens a step (SYNTHETIC acceptance)")
    return figure


def _draw_lengths(rows: Sequence[acceptance.Row], axes: Axes) -> None:
    """Draw one line for each engine and K. Marks are measurements of mtpc. A step of K drafts costs
    the same at any acceptance, so another engine's line follows from one measured step."""
    longest = 1 + max(row.spec_tokens for row in rows)
    for engine, k in dict.fromkeys((row.engine, row.spec_tokens) for row in rows):
        line = [row for row in rows if (row.engine, row.spec_tokens) == (engine, k)]
        places: list[float] = [1, k + 1 if k else longest]
        per_token = line[0].tokens_per_s / line[0].tokens_per_step
        speeds = [per_token * (length if k else 1) for length in places]
        label, mark = f"{engine} K={k}", None
        if line[0].synthetic_acceptance is not None:
            places = [row.tokens_per_step for row in line]
            speeds = [row.tokens_per_s for row in line]
            pays = acceptance.share(acceptance.pays_from(rows, line[0]))
            label, mark = f"{label}, pays from {pays}", "o"
        colour = {"mtpc": BLUE, "vLLM": RED, "llama.cpp": "#7a7a7a"}[engine.split()[0]]
        style = (":", "--", "-.", "-")[min(k, 3)]
        axes.plot(places, speeds, style, marker=mark, markersize=3, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, longest + 1))
    below: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    axes.legend(frameon=False, fontsize=6.5, columnspacing=1, **below)


def _tiers(record: Record, args: argparse.Namespace) -> Figure:
    """For each load bars of tokens per second of work, relative to K = 0 with the same weights."""
    rows = [tiers.Row(**row) for row in record["rows"]]
    loads, weights = (_values(record["rows"], name) for name in ("load", "weights"))
    title = f"{record['arguments']['shape']} MiMo shape, {_measured_on(record)}"
    figure, panels = _panels(1, len(loads), (5.2 * len(loads), 3.6), title)
    for load, axes in zip(loads, panels[0], strict=True):
        of_load = [row for row in rows if row.load == load]
        counts = list(dict.fromkeys(row.spec_tokens for row in of_load))
        width = 0.8 / len(counts)
        for number, k in enumerate(counts):
            shown = [row for row in of_load if row.spec_tokens == k]
            at = [weights.index(row.weights) + (number + 0.5) * width - 0.4 for row in shown]
            heights = [row.tokens_per_s / tiers.fixed(rows, row)[0] for row in shown]
            colour, label = BLUES[min(number, len(BLUES) - 1)], f"K = {k}"
            if k == tiers.AUTO:
                colour, label = RED, str(k)
            axes.bar(at, heights, width, color=colour, label=label)
        axes.axhline(1, color=BLACK, linewidth=0.6)
        axes.set_xticks(range(len(weights)), weights)
        axes.legend(frameon=False, fontsize=7)
        axes.set_title(load)
        axes.set_ylabel("tokens/s over those of K = 0")
    return figure


def _tier_grid(record: Record, args: argparse.Namespace) -> Figure:
    """For each machine the loads as dots: "auto" relative to the best fixed K and to K = 0."""
    machines, commit = _values(record["rows"], "costs"), record["versions"]["commit"]
    title = f'"auto" on {len(record["rows"])} simulated loads, commit {commit}'
    size = (3.4 * len(machines), 5.4)
    figure, panels = _panels(2, len(machines), size, title, sharex=True, sharey="row")
    for machine, column in zip(machines, panels.T, strict=True):
        rows = [row for row in record["rows"] if row["costs"] == machine]
        for axes, key, level in zip(column, ("best", "plain"), (BEST, 1), strict=True):
            _draw_dots(rows, key, level, axes)
        column[0].set_title(f"costs: {machine}")
        column[1].set_xlabel("acceptance")
    panels[0, 0].set_ylabel("speed over the best fixed K")
    panels[1, 0].set_ylabel("speed over K = 0")
    panels[0, 0].legend(frameon=False, fontsize=7, title="batch", ncols=2)
    return figure


def _draw_dots(rows: Sequence[Row], key: str, level: float, axes: Axes) -> None:
    chances, batches = (_values(rows, name) for name in ("acceptance", "batch"))
    for number, batch in enumerate(batches):
        shown = [row for row in rows if row["batch"] == batch]
        aside = 0.8 * (number + 0.5) / len(batches) - 0.4
        at = [chances.index(row["acceptance"]) + aside for row in shown]
        colour = BLUES[number % len(BLUES)]
        shares = [row[key] for row in shown]
        axes.plot(at, shares, "o", markersize=2, color=colour, label=str(batch))
    axes.axhline(level, color=RED, linewidth=0.6)
    axes.set_xticks(range(len(chances)), chances, rotation=45)


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
    for sample in (copies.Sample(**row) for row in record["rows"]):
        draft = "plain" if sample.setting == copies.PLAIN else sample.draft
        has_k = sample.engine == copies.MTPC and sample.setting != copies.PLAIN
        label = f"{sample.engine} {draft}{f' K={sample.setting}' * has_k}"
        total = sums.setdefault(label, {}).setdefault(sample.text, np.zeros(2))
        total += sample.tokens, sample.median
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


def _soak(record: Record, args: argparse.Namespace) -> Figure:
    """Memory and objects over tokens, with their bounds, and the requests."""
    rows = [soak.Interval(**row) for row in record["rows"]]
    last, bounds = rows[-1], soak.bounds_of(record["arguments"])
    warm = next(row for row in rows if row.tokens >= bounds.warm_up * last.tokens)
    lines = (
        ("resident MiB", [row.rss_mib for row in rows], warm.rss_mib + bounds.max_growth_mib),
        ("Python objects", [row.objects for row in rows], warm.objects + bounds.max_objects),
        ("pages, slots left", [row.pages_used + row.slots_used for row in rows], None),
        ("preemptions", [row.preemptions for row in rows], None),
    )
    done = f"{last.finished} requests finished, {last.aborted} aborted, {last.seconds:.0f} s"
    figure, panels = _panels(4, 1, (9, 8), f"{done}\n{_measured_on(record)}", sharex=True)
    tokens = [row.tokens / 1e3 for row in rows]
    for axes, (title, values, bound) in zip(panels[:, 0], lines, strict=True):
        axes.plot(tokens, values, color=BLUE, marker=".", markersize=3)
        axes.set_ylabel(title)
        if bound is not None:
            axes.hlines(bound, warm.tokens / 1e3, tokens[-1], color=ORANGE, linestyle="--",
                        label="bound after the warm-up")  # fmt: skip
            axes.legend(loc="lower left", frameon=False, bbox_to_anchor=(0.2, 0.55))
    axes.set_xlabel("thousand tokens")
    return figure


FIGURES: dict[str, Callable[[Record, argparse.Namespace], Figure]] = {
    "decode": _decode,
    "serving": _serving,
    "acceptance": _acceptance,
    "tiers": _tiers,
    "tier_grid": _tier_grid,
    "gpu_record": _gpu,
    "copies": _copies,
    "soak": _soak,
}
"""A record's benchmark -> what draws it."""

if __name__ == "__main__":
    sys.exit(main())
