"""The options of `mtpc plan`. This module imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from mtpc import CompileOptions
from mtpc.cli.compile_arguments import add_fields
from mtpc.cli.parsing import (
    SuggestingParser,
    add_switches,
    add_values,
    ids,
    invalid,
    parser_of,
    positive,
)

DEFAULT_LEN = 8192
DEVICE_NAMES = ("h200", "mi300x")
FIELDS = ("max_len", "page_size", "dtype", "quantize", "kv_cache_dtype")
"""Fields of `CompileOptions` that a plan on paper depends on, beside K."""
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
    return parser_of(ids, f"integers >= {low}, as 1,2,3", lambda found: found and min(found) >= low)


microseconds = parser_of(float, "microseconds, as 10", lambda value: 0 <= value < math.inf)


def add_plan(parser: SuggestingParser) -> None:
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
    )
    add_fields(parser, CompileOptions, *FIELDS, max_len=f"{DEFAULT_LEN}, or the model's most")
    text = "device with published figures (default: %(default)s)"
    parser.add_argument("--device", choices=DEVICE_NAMES, default=DEVICE_NAMES[0], help=text)
    text = "give each device whole experts, by transformers' expert plan"
    add_switches(parser, ("--enable-expert-parallel", text))
