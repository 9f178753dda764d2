"""`mtpc train-draft`: train a drafter for a model that has none, from the model itself."""

from __future__ import annotations

import argparse

from mtpc.cli.tune_head import tune


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    return tune(args, args.form)
