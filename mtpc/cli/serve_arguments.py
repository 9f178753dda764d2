"""The options of `mtpc serve` beyond the compile options. This module imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mtpc.cli.compile_arguments import add_fields, given_fields
from mtpc.cli.parsing import SuggestingParser, add_switches, add_values
from mtpc.server.options import ServerOptions


def add_server_options(parser: SuggestingParser) -> None:
    """Add options for the fields of `ServerOptions`."""
    group = parser.group("server")
    key = group.add_mutually_exclusive_group()
    text = "key that clients must send; other users of this machine can see it in ps"
    add_values(key, ("--api-key", str, "KEY", text))
    text = "file whose first line is the key (default: MTPC_API_KEY, if it is set)"
    add_values(key, ("--api-key-file", Path, "FILE", text))
    add_fields(parser, ServerOptions)
    text = "ignored, for vLLM's users: tools are on if the format of tool calls is known"
    add_switches(group, ("--enable-auto-tool-choice", text))


def server_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerOptions` that the user gave. The command reads `--api-key-file`."""
    return given_fields(args, ServerOptions)
