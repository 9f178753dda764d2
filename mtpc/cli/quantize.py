"""`mtpc quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

import argparse
import sys

from mtpc.cli.tables import format_bytes
from mtpc.layout.display import show_progress
from mtpc.weights.write_quantised import quantise_checkpoint


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    with show_progress(sys.stderr) as tell:
        written = quantise_checkpoint(
            args.checkpoint, args.out, args.scheme, args.head, args.keep or (), tell
        )
    print(
        f"{args.out}: {written.quantised} weights in {args.scheme}, {len(written.plain)} matrices "
        f"plain; {format_bytes(written.bytes_before)} -> {format_bytes(written.bytes_after)}"
    )
    return 0
