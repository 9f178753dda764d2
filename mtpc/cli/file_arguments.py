"""Arguments of the commands that write files and compile nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from mtpc.cli.parsing import positive
from mtpc.config import SCHEMES


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mtpc quantize`."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint of plain weights, or an id of the local hub cache",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new directory")
    parser.add_argument(
        "--scheme", required=True, metavar="SCHEME", help=f"one of {', '.join(SCHEMES)}"
    )
    parser.add_argument(
        "--head",
        action="store_true",
        help="quantise output heads, too: vLLM reads them since March 2026, SGLang does not",
    )
    parser.add_argument(
        "--keep",
        action="append",
        metavar="PATTERN",
        help="leave modules of these names plain, as '*.self_attn.*'; repeatable",
    )


def add_graft(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mtpc graft`."""
    for name, text in (
        ("base", "checkpoint with MTP layers, of which the fine-tune was made"),
        ("finetune", "checkpoint that lost them, or holds broken ones"),
    ):
        parser.add_argument(name, type=Path, metavar=name.upper(), help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="the new directory")


def add_vocab(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mtpc vocab`."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="checkpoint with the tokenizer (default: the demo model)",
    )
    parser.add_argument(
        "texts", nargs="+", type=Path, metavar="TEXT", help="text files whose tokens are counted"
    )
    parser.add_argument(
        "-n",
        "--tokens",
        type=positive,
        metavar="N",
        help="keep the N most frequent tokens (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="output file, one id per line"
    )
