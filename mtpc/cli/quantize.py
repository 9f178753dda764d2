"""`mtpc quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import tensor

from mtpc.cli.tables import format_bytes
from mtpc.errors import OptionError
from mtpc.layout.terminal import show_progress
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.plain_file import read_text
from mtpc.weights.rounding import Sensitivity
from mtpc.weights.write_quantised import Calibrate, nothing_known, quantise_checkpoint

_TOKENS = 4096
"""The most tokens of a calibration text that are run."""


def command(args: argparse.Namespace) -> int:
    with show_progress(sys.stderr) as tell:
        calibrate: Calibrate = nothing_known
        text = args.calibration
        if text is not None or args.bits is not None:
            calibrate = partial(_calibrated, text=text or Path(), tell=tell)
        how = (args.scheme, args.head, args.keep or (), calibrate, args.bits)
        written = quantise_checkpoint(args.checkpoint, args.out, *how, tell)
    counts = [f"{count} weights in {name}" for name, count in written.quantised.items()]
    print(
        f"{args.out}: {', '.join(counts)}, {len(written.plain)} matrices plain; "
        f"{format_bytes(written.bytes_before)} -> {format_bytes(written.bytes_after)}"
    )
    return 0


def _calibrated(
    checkpoint: Checkpoint, text: Path, tell: Callable[[str, float], None]
) -> Mapping[str, Sensitivity]:
    """What the first tokens of a text show of a checkpoint's weights.

    Raises:
        OptionError: the text is too short.
    """
    from mtpc.models.calibrate import WINDOW, sensitivities  # It imports transformers.
    from mtpc.weights.served_model import ServedModel

    served = ServedModel(str(checkpoint.directory), 0, (), checkpoint.directory)
    ids = served.encode(_help_topics() if text == Path() else read_text(text))[:_TOKENS]
    if len(ids) < WINDOW:
        raise OptionError(f"{text} has {len(ids)} tokens; expected at least {WINDOW}")
    return sensitivities(checkpoint, tensor(ids), tell)


def _help_topics() -> str:
    """English with code: what Python's help() knows of its language, some of each topic."""
    from pydoc_data.topics import topics

    return "\n".join(text[:1000] for text in topics.values())
