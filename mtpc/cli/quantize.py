"""`mtpc quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, tensor

from mtpc.cli.tables import format_bytes
from mtpc.errors import OptionError
from mtpc.layout.terminal import show_progress
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.plain_file import read_text
from mtpc.weights.write_quantised import NO_MOMENTS, quantise_checkpoint

_TOKENS = 16384
"""The most tokens of a calibration text that are run."""


def command(args: argparse.Namespace) -> int:
    with show_progress(sys.stderr) as tell:
        moments = NO_MOMENTS
        if args.calibration is not None:
            moments = _calibrated(args.checkpoint, args.calibration, tell)
        written = quantise_checkpoint(
            args.checkpoint, args.out, args.scheme, args.head, args.keep or (), moments, tell
        )
    print(
        f"{args.out}: {written.quantised} weights in {args.scheme}, {len(written.plain)} matrices "
        f"plain; {format_bytes(written.bytes_before)} -> {format_bytes(written.bytes_after)}"
    )
    return 0


def _calibrated(
    source: Path, text: Path, tell: Callable[[str, float], None]
) -> Mapping[str, Tensor]:
    """Second moments of the inputs of a checkpoint's weights over the first tokens of a text.

    Raises:
        OptionError: the text is too short.
    """
    from mtpc.models.calibrate import WINDOW, second_moments  # It imports transformers.
    from mtpc.weights.served_model import ServedModel

    checkpoint = Checkpoint(source)
    served = ServedModel(str(source), 0, (), checkpoint.directory)
    ids = served.encode(_help_topics() if text == Path() else read_text(text))[:_TOKENS]
    if len(ids) < WINDOW:
        raise OptionError(f"{text} has {len(ids)} tokens; expected at least {WINDOW}")
    return second_moments(checkpoint, tensor(ids), tell)


def _help_topics() -> str:
    """English with code: what Python's help() knows of its language, some of each topic."""
    from pydoc_data.topics import topics

    return "\n".join(text[:1000] for text in topics.values())
