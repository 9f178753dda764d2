"""What a server is told: address, key, limits. Imports neither starlette nor torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpc.errors import OptionError, ServingError

HTTP_PARSERS = ("auto", "httptools", "h11")
_NEEDED = ("starlette", "uvicorn", "jinja2")


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens, and what it bears; docs/server.md says more of each limit.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        model_name: what requests call the model; None is the checkpoint directory's name.
        api_key: what clients must send as bearer token; None lets everybody in.
        chat_template: file with a Jinja template, instead of the checkpoint's.
        max_tokens: new tokens a request may ask for; None: as many as `max_len` leaves.
        max_requests: choices in the engine at once.
        max_queue: choices that may wait for a place there; more are told to come again (429).
        max_body_bytes: of a request.
        max_connections: open at once; further ones are closed.
        header_seconds: for a request's head to arrive.
        body_seconds: for its body.
        write_seconds: for a client to read on when its buffers are full.
        keep_alive_seconds: that a connection may be idle between two requests.
        drain_seconds: for running requests to end after SIGTERM.
        http: uvicorn's HTTP parser, one of HTTP_PARSERS.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    chat_template: Path | None = None
    max_tokens: int | None = None
    max_requests: int = 256
    max_queue: int = 256
    max_body_bytes: int = 2**20
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    http: str = "auto"

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_seconds"):
                _check_seconds(entry.name, value)
            elif entry.name.startswith("max_") and value is not None:
                _check_count(entry.name, value, 0 if entry.name == "max_queue" else 1)
        _check_count("port", self.port, 0)
        if self.port > 65535:
            raise OptionError(f"port is {self.port}; expected 0..65535")
        if self.http not in HTTP_PARSERS:
            raise OptionError(f"http is {self.http!r}; expected one of {', '.join(HTTP_PARSERS)}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("the API key has characters that no HTTP header can carry")
        if self.api_key == "":
            raise OptionError("the API key is empty; give one, or none to let everybody in")

    @property
    def most_choices(self) -> int:
        """Choices that may be in the server at once, waiting ones included."""
        return self.max_requests + self.max_queue


def require_packages() -> None:
    """Say what is missing before minutes are spent on compiling.

    Raises:
        ServingError: the extra `serve` is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ServingError(
            f"the server needs {', '.join(missing)}, not installed here: pip install 'mtpc[serve]'"
        )


def _check_count(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OptionError(f"{name} is {value!r}; expected an integer >= {low}")


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise OptionError(f"{name} is {value!r}; expected a positive number of seconds")
