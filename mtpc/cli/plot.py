"""The picture of `mtpc bench --plot`: tokens per second and accepted drafts of each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from mtpc.errors import OptionError
from mtpc.weights.plain_file import write_output

SUFFIXES = (".png", ".svg")
_SPEED, _STEP = "#1f6f8b", "#57b0a6"


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn, before measurements that take minutes.

    Raises:
        OptionError: the file's name ends otherwise, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--plot is {path}; expected a file that ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib, not installed here: pip install matplotlib")


def draw_plot(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], title: str, path: Path
) -> None:
    """Write the picture, a PNG or SVG file. `rows` are what `mtpc bench` measured of each variant;
    speeds are shown over that of the first.

    Raises:
        OptionError: the file cannot be written.
    """
    # Here: it takes longer to import than a short run.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.5 * len(rows), 3.6), layout="constrained")
    speed, accepted = figure.subplots(1, 2)
    speeds = [row["tokens_per_s"] for row in rows]
    drawn = speed.bar(names, speeds, color=_SPEED)
    speed.bar_label(drawn, [f"{tokens_per_s / speeds[0]:.2f}x" for tokens_per_s in speeds])
    speed.set_title("tokens per second")
    drawn = accepted.bar(names, [row["tokens_per_step"] for row in rows], color=_STEP)
    rates = [row["acceptance_rate"] for row in rows]
    accepted.bar_label(drawn, ["" if rate is None else f"{rate:.0%} accepted" for rate in rates])
    accepted.set_title("tokens per step of a request")
    for axes in (speed, accepted):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.suptitle(title)
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    try:
        write_output(path, drawn.getvalue())
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from None
