"""Arguments of the commands that compile nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from mtpc.cli.parsing import add_switches, add_values, positive
from mtpc.config import SCHEMES


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mtpc quantize`."""
    add = parser.add_argument
    text = "checkpoint of plain weights, a GGUF file, or an id of the Hugging Face hub"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    add("out", type=Path, metavar="OUT", help="the new directory, or the new GGUF file")
    add("--scheme", required=True, metavar="SCHEME", help=f"one of {', '.join(SCHEMES)}")
    text = "text that shows which inputs are large; without FILE, Python's help topics"
    add("--calibration", nargs="?", type=Path, const=Path(), metavar="FILE", help=text)
    text = "quantise output heads, too: vLLM reads them since March 2026, SGLang does not"
    add_switches(parser, ("--head", text))
    text = "leave modules of these names plain, as '*.self_attn.*'; repeatable"
    add("--keep", action="append", metavar="PATTERN", help=text)


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
    add = parser.add_argument
    text = "checkpoint with the tokenizer (default: the demo model)"
    add_values(parser, ("--checkpoint", Path, "DIR", text))
    add("texts", nargs="+", type=Path, metavar="TEXT", help="text files whose tokens are counted")
    text = "keep the N most frequent tokens (default: all)"
    add("-n", "--tokens", type=positive, metavar="N", help=text)
    text = "output file, one id per line"
    add("--out", type=Path, required=True, metavar="FILE", help=text)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mtpc models`."""
    text = "classes of transformers, as LlamaForCausalLM: say whether each runs, or why it does not"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    add_switches(parser, ("--all", "ask every causal LM class of transformers; takes a minute"))
