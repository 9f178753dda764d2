"""Draws tokens per second by acceptance length, of mtpc and other engines, for `benchmarks.plot`.

One column of panels per batch, one row for engines of 16 bits a weight and one for 4 bits. A step
of K drafts costs the same at any acceptance, so another engine's line follows from one measured
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.acceptance import Row, pays_from, rows_of, share
from benchmarks.harness.results import Record
from benchmarks.plot import measured_on

WEIGHTS = {
    "bfloat16 weights": ("mtpc", "vLLM", "llama.cpp BF16"),
    "4-bit weights": ("mtpc int4-g32", "llama.cpp Q4_0"),
}
"""Row of panels -> its engines."""
COLOURS = {"mtpc": "#1f6f8b", "vLLM": "#c8553d", "llama.cpp": "#7a7a7a"}
STYLES = {0: ":", 1: "--", 2: "-.", 3: "-"}


def figure(record: Record) -> Figure:
    """The picture."""
    rows = rows_of(record)
    batches = sorted({row.batch for row in rows})
    engines = {row.engine for row in rows}
    kinds = [kind for kind, those in WEIGHTS.items() if engines & set(those)]
    size = (5.2 * len(batches), 0.6 + 4.2 * len(kinds))
    drawn = Figure(figsize=size, layout="constrained")
    panels = drawn.subplots(len(kinds), len(batches), squeeze=False)
    for kind, line in zip(kinds, panels, strict=True):
        for batch, axes in zip(batches, line, strict=True):
            shown = [r for r in rows if r.batch == batch and r.engine in WEIGHTS[kind]]
            _draw(shown, axes)
            axes.set_title(f"{kind}, batch {batch}")
        line[0].set_ylabel("tokens/s")
    for axes in panels[-1]:
        axes.set_xlabel("tokens a step (SYNTHETIC acceptance)")
    of = f"Tokens a second by acceptance length: {record['arguments']['shape']} MiMo shape"
    drawn.suptitle(f"{of}, {measured_on(record)}")
    return drawn


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    """Draw one line for each engine and K. Marks are measurements of mtpc."""
    longest = 1 + max(row.spec_tokens for row in rows)
    for engine, k in dict.fromkeys((row.engine, row.spec_tokens) for row in rows):
        line = [row for row in rows if (row.engine, row.spec_tokens) == (engine, k)]
        is_ours = line[0].synthetic_acceptance is not None
        ends = (1, k + 1 if k else longest)
        places = [row.tokens_per_step for row in line] if is_ours else ends
        per_token = line[0].tokens_per_s / line[0].tokens_per_step
        speeds = (
            [row.tokens_per_s for row in line]
            if is_ours
            else [per_token * (length if k else 1) for length in ends]
        )
        pays = f", pays from {share(pays_from(rows, line[0]))}" if is_ours else ""
        axes.plot(
            places,
            speeds,
            STYLES.get(k, "-"),
            marker="o" if is_ours else None,
            markersize=3,
            color=COLOURS[engine.split()[0]],
            label=f"{engine} K={k}{pays}",
        )
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, longest + 1))
    below: dict[str, Any] = dict(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, columnspacing=1
    )
    axes.legend(frameon=False, fontsize=6.5, **below)
    axes.spines[["top", "right"]].set_visible(False)
