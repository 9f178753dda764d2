"""The options of `mtpc serve` that are not those of compiling. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from mtpc.server.options import HTTP_PARSERS, ServerOptions

_LIMITS = (
    ("max_tokens", int, "N", "new tokens a request may ask for (default: what max-len leaves)"),
    ("max_requests", int, "N", "texts in the engine at once"),
    ("max_queue", int, "N", "texts that may wait for that; more get status 429"),
    ("max_body_bytes", int, "N", "of a request"),
    ("max_connections", int, "N", "open at once; further ones are closed"),
    ("header_seconds", float, "S", "for the head of a request to arrive"),
    ("body_seconds", float, "S", "for its body to arrive"),
    ("write_seconds", float, "S", "for a client that does not read to read on"),
    ("keep_alive_seconds", float, "S", "that a connection may be idle"),
    ("drain_seconds", float, "S", "for running requests to end after SIGTERM"),
)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `ServerOptions`, and of `CompileOptions` those that only a server has."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", metavar="ADDRESS", help=f"listen here {_default('host')}")
    add("--port", type=int, metavar="N", help=f"TCP port; 0 takes a free one {_default('port')}")
    add("--model-name", metavar="NAME", help="what requests call it (default: the directory's)")
    key = group.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="clients must send it; others see it in ps")
    key.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the key is this file's first line (default: MTPC_API_KEY, if it is set)",
    )
    text = "Jinja file, in place of the checkpoint's"
    add("--chat-template", type=Path, metavar="FILE", help=text)
    text = f"uvicorn's parser: {', '.join(HTTP_PARSERS)} {_default('http')}"
    add("--http", choices=HTTP_PARSERS, metavar="NAME", help=text)
    limits = parser.add_argument_group("server limits")
    for name, kind, metavar, text in _LIMITS:
        shown = text if name == "max_tokens" else f"{text} {_default(name)}"
        flag = f"--{name.replace('_', '-')}"
        limits.add_argument(flag, type=kind, metavar=metavar, help=shown)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--no-sampling",
        action="store_false",
        dest="sampling",
        help="compile for greedy decoding alone; other requests are refused",
    )
    sampling.add_argument(
        "--max-logprobs",
        type=int,
        metavar="N",
        help="most probable tokens a request may have reported (default: 5)",
    )


def server_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerOptions` that the user gave, the key's file left to the command."""
    given = {f.name: getattr(args, f.name) for f in fields(ServerOptions)}
    return {name: value for name, value in given.items() if value is not None}


def _default(name: str) -> str:
    value = getattr(ServerOptions, name)
    return f"(default: {value:g})" if isinstance(value, float) else f"(default: {value})"
