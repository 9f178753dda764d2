"""The picture of `mtpc bench --plot`: tokens per second and accepted drafts of each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mtpc.errors import OptionError

SUFFIXES = (".png", ".svg")
_SPEED, _STEP = "#1f6f8b", "#57b0a6"


@dataclass(frozen=True)
class Bar:
    """One variant.

    Attributes:
        name: what the picture calls it.
        tokens_per_s: new tokens of all requests per second.
        tokens_per_step: new tokens of one request per step.
        acceptance_rate: accepted drafts divided by verified ones, or None.
    """

    name: str
    tokens_per_s: float
    tokens_per_step: float
    acceptance_rate: float | None


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn, before measurements that take minutes.

    Raises:
        OptionError: the file's name ends otherwise, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--plot is {path}; expected a file that ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib, not installed here: pip install matplotlib")


def draw_plot(bars: Sequence[Bar], title: str, path: Path) -> None:
    """Write the picture.

    Args:
        bars: the variants; speeds are shown over that of the first.
        title: stands above the picture.
        path: a PNG or SVG file.

    Raises:
        OptionError: the file cannot be written.
    """
    # Here: it takes longer to import than a short run.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.5 * len(bars), 3.6), layout="constrained")
    speed, accepted = figure.subplots(1, 2)
    names = [bar.name for bar in bars]
    drawn = speed.bar(names, [bar.tokens_per_s for bar in bars], color=_SPEED)
    gains = [f"{bar.tokens_per_s / bars[0].tokens_per_s:.2f}x" for bar in bars]
    speed.bar_label(drawn, gains)
    speed.set_title("tokens per second")
    drawn = accepted.bar(names, [bar.tokens_per_step for bar in bars], color=_STEP)
    rates = [bar.acceptance_rate for bar in bars]
    accepted.bar_label(drawn, ["" if rate is None else f"{rate:.0%} accepted" for rate in rates])
    accepted.set_title("tokens per step of a request")
    for axes in (speed, accepted):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from None
