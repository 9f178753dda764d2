"""The options of `mtpc plan`. This module imports no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from mtpc import CompileOptions
from mtpc.cli.parsing import add_switches, add_values, ids, invalid, positive
from mtpc.config import DTYPES, KV_CACHE_DTYPES, SCHEMES

DEFAULT_LEN = 8192
DEVICE_NAMES = ("h200", "mi300x")
_UNITS = {
    f"{prefix}{i}B": base**power
    for i, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", 1)
}


def size(text: str) -> int:
    """Parse bytes, or bytes a second: "141GiB", "4.8TB/s"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)(?:/s)?", text.strip())
    if match is None or not float(match[1]):
        raise invalid(text, "a size with its unit, as 141GiB, 192GB or 4.8TB/s")
    return int(float(match[1]) * _UNITS[match[2]])


def counts(low: int) -> Callable[[str], list[int]]:
    """A parser of one integer or several, none of them below `low`."""

    def parse(text: str) -> list[int]:
        found = ids(text)
        if not found or min(found) < low:
            raise invalid(text, f"integers >= {low}, as 1,2,3")
        return found

    return parse


def microseconds(text: str) -> float:
    """Parse a time that is 0 or more."""
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        raise invalid(text, "microseconds, as 10")
    return float(text)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add all options of the command."""
    text = "hub id, or directory with config.json and perhaps *.safetensors (headers are read)"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    shared = "devices that share one replica of the model (default: all)"
    add_values(
        parser,
        ("--devices", positive, "N", "devices in all", 1),
        ("--tensor-parallel-size", positive, "N", shared),
        ("--memory", size, "SIZE", "memory of one device (default: the device's)"),
        ("--bandwidth", size, "RATE", "its memory bandwidth (default: the device's)"),
        (
            "--link-bandwidth",
            size,
            "RATE",
            "its bandwidth to others, one way (default: known)",
        ),
        ("--collective-latency", microseconds, "US", "latency of a collective, assumed", 10.0),
        ("--batch", counts(1), "R,R", "requests of a step", "1,64"),
        ("--spec-tokens", counts(0), "K,K", "drafts per step (default: 0,1,2,3)"),
        ("--page-size", positive, "N", "tokens per KV page", CompileOptions.page_size),
    )
    text = f"tokens of every request (default: {DEFAULT_LEN}, or the model's most)"
    parser.add_argument("--max-len", "--max-model-len", type=positive, metavar="N", help=text)
    for flag, names, text in (
        ("--device", DEVICE_NAMES, "device with published figures (default: h200)"),
        ("--dtype", DTYPES, "dtype of the weights (default: the checkpoint's)"),
        ("--quantize", SCHEMES, "plan with weights of this scheme"),
        ("--kv-cache-dtype", KV_CACHE_DTYPES, "plan with a KV cache of this dtype"),
    ):
        parser.add_argument(flag, choices=tuple(names), help=text)
    text = "give each device whole experts, by transformers' expert plan"
    add_switches(parser, ("--enable-expert-parallel", text))
