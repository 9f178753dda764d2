"""Finds checkpoints, and the demo model that commands use if no checkpoint is given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mtpc.errors import RequestError
from mtpc.weights.hub import demo as demo_checkpoint
from mtpc.weights.hub import find_directory, no_checkpoint

DEFAULT_PROMPT = "The with statement is used to wrap the execution of a block with"
"""The default prompt of `mtpc run`. The demo model is trained on Python's documentation only."""
BENCH_PROMPTS = (
    DEFAULT_PROMPT,
    "The dictionary view objects provide a dynamic view on",
    "If the class defines a method named",
    "The following exceptions are raised when",
)
"""The default prompts of `mtpc bench` and `mtpc check`."""


def chosen_checkpoint(given: Path | None) -> Path:
    """The directory of the checkpoint that a command was given, or the demo model's.

    Raises:
        CheckpointError: the directory does not exist; or see `find_directory`, `demo`.
    """
    directory = demo_checkpoint() if given is None else find_directory(given)
    if not directory.exists():
        raise no_checkpoint(directory)
    return directory


def chosen_prompts(args: argparse.Namespace) -> list[Any]:
    """The prompts of a command that measures acceptance; by default the demo model's.

    Raises:
        RequestError: a checkpoint is given, and no prompt.
    """
    if args.checkpoint is not None and not args.prompts:
        raise RequestError(
            "no prompt is given; the number of accepted drafts depends on the text: give prompts "
            f"that suit {args.checkpoint}, with -p or --ids"
        )
    return args.prompts or list(BENCH_PROMPTS)
