"""The options of `mtpc serve` beyond the compile options. This module imports no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mtpc.cli.parsing import SuggestingParser, add_values
from mtpc.server.options import HTTP_PARSERS, LOG_LEVELS, REASONING, ServerOptions
from mtpc.server.tool_formats import PARSERS

_LIMITS = (
    (
        *("max_tokens", int, "N"),
        "most new tokens that a request may ask for (default: what max-len leaves)",
    ),
    ("max_requests", int, "N", "most texts in the engine at once"),
    ("max_queue", int, "N", "most texts that wait for the engine; further ones get status 429"),
    (
        *("max_body_bytes", int, "N"),
        "largest body of a request (default: 1048576; 33554432 with --images)",
    ),
    (
        *("max_total_body_bytes", int, "N"),
        "most bytes of the bodies of all requests together; the largest makes room",
    ),
    ("max_images", int, "N", "most images of a request, with --images"),
    ("max_connections", int, "N", "most open connections; further ones are closed"),
    ("header_seconds", float, "S", "time limit for the head of a request to arrive"),
    ("body_seconds", float, "S", "time limit for the body of a request to arrive"),
    ("write_seconds", float, "S", "time limit for a client with full buffers to read something"),
    ("keep_alive_seconds", float, "S", "longest time that a connection is idle between requests"),
    ("drain_seconds", float, "S", "time limit for running requests to end after SIGTERM"),
)


def add_server_options(parser: SuggestingParser) -> None:
    """Add options for the fields of `ServerOptions`."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", metavar="ADDRESS", help=f"address to listen on {_default('host')}")
    add("--port", type=int, metavar="N", help=f"TCP port; 0 takes a free one {_default('port')}")
    text = "the model's name in requests (default: the directory's name)"
    add("--model-name", "--served-model-name", metavar="NAME", help=text)
    key = group.add_mutually_exclusive_group()
    text = "key that clients must send; other users of this machine can see it in ps"
    key.add_argument("--api-key", metavar="KEY", help=text)
    text = "file whose first line is the key (default: MTPC_API_KEY, if it is set)"
    add_values(key, ("--api-key-file", Path, "FILE", text))
    text = "Jinja file to use instead of the checkpoint's chat template"
    add_values(group, ("--chat-template", Path, "FILE", text))
    text = f"uvicorn's parser: {', '.join(HTTP_PARSERS)} {_default('http')}"
    add("--http", choices=HTTP_PARSERS, metavar="NAME", help=text)
    text = (
        "names that requests may have in their Host header, separated by commas; * allows any "
        "(default: loopback names, on a loopback address without a key; else any)"
    )
    add_values(group, ("--allowed-hosts", lambda text: tuple(text.split(",")), "NAMES", text))
    _add_formats(add)
    limits = parser.further("server limits")
    for name, kind, metavar, text in _LIMITS:
        shown = text if "(default" in text else f"{text} {_default(name)}"
        add_values(limits, (f"--{name.replace('_', '-')}", kind, metavar, shown))


def _add_formats(add: Callable[..., Any]) -> None:
    """Options for the origins that may read answers, and for how the model writes them."""
    text = "origins whose web pages may read answers (CORS), separated by commas; * allows any"
    add("--allowed-origins", type=_origins, metavar="ORIGINS", help=f"{text} (default: none)")
    for name, known, what in (
        ("tool-call-parser", PARSERS, "tool calls"),
        ("reasoning-parser", REASONING, "its reasoning"),
    ):
        text = f"how the model writes {what}: {', '.join(known)}"
        shown = _default(name.replace("-", "_"))
        add(f"--{name}", choices=known, metavar="NAME", help=f"{text} {shown}")
    text = f"what to log: {', '.join(LOG_LEVELS)} {_default('log_level')}"
    add("--log-level", choices=LOG_LEVELS, metavar="NAME", help=text)
    text = "ignored, for vLLM's users: tools are on if the format of tool calls is known"
    add("--enable-auto-tool-choice", action="store_true", help=text)


def _origins(text: str) -> tuple[str, ...]:
    """Parse origins, also as the JSON list that vLLM takes."""
    try:
        listed = json.loads(text)
    except ValueError:
        listed = text.split(",")
    return tuple(listed) if isinstance(listed, list) else (text,)


def server_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerOptions` that the user gave. The command reads `--api-key-file`."""
    given = {f.name: getattr(args, f.name) for f in fields(ServerOptions)}
    return {name: value for name, value in given.items() if value is not None}


def _default(name: str) -> str:
    value = getattr(ServerOptions, name)
    return f"(default: {value:g})" if isinstance(value, float) else f"(default: {value})"
