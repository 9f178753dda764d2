"""The options of a server. This module imports neither starlette nor torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpc.errors import OptionError, ServingError
from mtpc.option_checks import check_int
from mtpc.server.tool_formats import PARSERS

REASONING = ("auto", "none", "deepseek_r1", "glm45", "mimo", "qwen3")
"""Values of `reasoning_parser`. vLLM's names all stand for one format, `<think>...</think>`. "auto"
looks for it in the chat template."""
LOG_LEVELS = ("debug", "info", "warning", "error")
HTTP_PARSERS = ("auto", "httptools", "h11")
_TEXT_BODY_BYTES, _IMAGES_BODY_BYTES = 2**20, 2**25
_NEEDED = ("starlette", "uvicorn", "jinja2")


@dataclass(frozen=True)
class ServerOptions:
    """A server's address, API key and limits. docs/server.md describes each limit.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        model_name: the model's name in requests; None is the checkpoint directory's name.
        api_key: bearer token that clients must send; None admits every client.
        chat_template: file with a Jinja template to use instead of the checkpoint's.
        max_tokens: the most new tokens that a request may ask for; None is the number that
            `max_len` leaves.
        max_requests: the most choices in the engine at once.
        max_queue: the most choices that wait for the engine. The server refuses further ones with
            status 429.
        max_body_bytes: the largest body of a request, in bytes. The default becomes 32 MiB for a
            model that takes images.
        max_total_body_bytes: the most bytes of the bodies of all requests, from their first byte
            until they are prompts. At least one body always has room.
        max_images: the most images in a request, for a model that takes images.
        max_connections: the most open connections. The server closes further ones.
        header_seconds: time limit for a request's head.
        body_seconds: time limit for a request's body.
        write_seconds: time limit for a client to read something while its buffers are full.
        keep_alive_seconds: the longest time that a connection is idle between two requests.
        drain_seconds: time limit for running requests to end after SIGTERM.
        http: uvicorn's HTTP parser, one of HTTP_PARSERS.
        allowed_hosts: names, without ports, that requests may have in their Host header; "*" allows
            any. None means loopback names where `host` is a loopback address and there is no API
            key, else any.
        allowed_origins: origins whose web pages may read answers (CORS), such as
            "https://app.example"; "*" allows any, () none.
        tool_call_parser: how the model writes tool calls, one of
            `mtpc.server.tool_formats.PARSERS`; "auto" finds the format in the chat template.
        reasoning_parser: how the model writes its reasoning, one of REASONING.
        log_level: what `mtpc serve` logs, one of LOG_LEVELS.

    Raises:
        OptionError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    chat_template: Path | None = None
    max_tokens: int | None = None
    max_requests: int = 256
    max_queue: int = 256
    max_body_bytes: int = _TEXT_BODY_BYTES
    max_total_body_bytes: int = 2**28
    max_images: int = 16
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    http: str = "auto"
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_seconds"):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not is_number or not 0 < value < math.inf:
                    raise OptionError(
                        f"{entry.name} is {value!r}; expected a positive number of seconds"
                    )
            elif entry.name.startswith("max_") and value is not None:
                check_int(entry.name, value, 0 if entry.name == "max_queue" else 1)
        check_int("port", self.port, 0, 65535)
        if self.http not in HTTP_PARSERS:
            raise OptionError(f"http is {self.http!r}; expected one of {', '.join(HTTP_PARSERS)}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError(
                "the API key has characters that no HTTP header can carry; expected printable ASCII"
            )
        if self.allowed_hosts is not None and not _all_match(self.allowed_hosts, r"[^\s/@]+", 1):
            raise OptionError(
                f"allowed_hosts is {self.allowed_hosts!r}; expected host names without ports, such "
                "as ('api.example',)"
            )
        if not _all_match(self.allowed_origins, r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@]+"):
            raise OptionError(
                f"allowed_origins is {self.allowed_origins!r}; expected origins without paths, "
                "such as ('https://app.example',), or ('*',)"
            )
        for name, known in (
            ("tool_call_parser", PARSERS),
            ("reasoning_parser", REASONING),
            ("log_level", LOG_LEVELS),
        ):
            if getattr(self, name) not in known:
                raise OptionError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}"
                )
        if self.api_key == "":
            raise OptionError("the API key is empty; give a key, or no key to admit every client")

    def for_images(self) -> ServerOptions:
        """These options with the default of `max_body_bytes` for a model that takes images."""
        is_default = self.max_body_bytes == _TEXT_BODY_BYTES
        return replace(self, max_body_bytes=_IMAGES_BODY_BYTES) if is_default else self

    @property
    def most_choices(self) -> int:
        """The most choices that the server holds at once, including waiting ones."""
        return self.max_requests + self.max_queue


def require_packages(
    user: str = "the server", names: Sequence[str] = _NEEDED, extra: str = "serve"
) -> None:
    """Check that packages of an extra are installed, before a compilation takes minutes.

    Args:
        user: what needs them, for the message.
        names: the modules to look for.
        extra: the extra of mtpc that installs them.

    Raises:
        ServingError: one is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ServingError(
            f"{user} needs {', '.join(missing)}, not installed here: pip install 'mtpc[{extra}]'"
        )


def _all_match(texts: Any, pattern: str, least: int = 0) -> bool:
    """Whether a value is a tuple of at least `least` texts that match a pattern."""
    if not isinstance(texts, tuple) or len(texts) < least:
        return False
    return all(isinstance(text, str) and re.fullmatch(pattern, text) for text in texts)
