"""The options of a server. This module imports neither starlette nor torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpc.declaration import declared, option
from mtpc.errors import OptionError, ServingError
from mtpc.option_checks import Check, integer, one_of, or_none
from mtpc.server.tool_formats import PARSERS

REASONING = ("auto", "none", "deepseek_r1", "glm45", "mimo", "qwen3")
"""Values of `reasoning_parser`. vLLM's names all stand for one format, `<think>...</think>`. "auto"
looks for it in the chat template."""
LOG_LEVELS = ("debug", "info", "warning", "error")
HTTP_PARSERS = ("auto", "httptools", "h11")
_TEXT_BODY_BYTES, _IMAGES_BODY_BYTES = 2**20, 2**25
_NEEDED = ("starlette", "uvicorn", "jinja2")


def _given(name: str, value: Any) -> Any:
    return value


def _key(name: str, value: Any) -> str:
    if not (value.isascii() and value.isprintable()):
        raise OptionError(
            "the API key has characters that no HTTP header can carry; expected printable ASCII"
        )
    if not value:
        raise OptionError("the API key is empty; give a key, or no key to admit every client")
    return str(value)


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise OptionError(f"{name} is {value!r}; expected a positive number of seconds")
    return float(value)


def _texts(pattern: str, wanted: str, least: int = 0) -> Check:
    """The check for a tuple of at least `least` texts that match a pattern."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        texts = value if isinstance(value, tuple) and len(value) >= least else (None,)
        if not all(isinstance(text, str) and re.fullmatch(pattern, text) for text in texts):
            raise OptionError(f"{name} is {value!r}; expected {wanted}")
        return texts

    return check


_hosts = _texts(r"[^\s/@]+", "host names without ports, such as ('api.example',)", least=1)
_origins = _texts(
    r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@]+",
    "origins without paths, such as ('https://app.example',), or ('*',)",
)
_whole = integer(1)


def _server(default: Any, help: str, metavar: str, check: Check = _given, **more: Any) -> Any:
    return option(default, "server", check, help, metavar, common=True, **more)


def _named(default: str, known: Sequence[str], help: str) -> Any:
    return _server(default, f"{help}: {', '.join(known)}", "NAME", one_of(known))


def _limit(default: Any, help: str, check: Check = _whole, **more: Any) -> Any:
    return option(default, "server limits", check, help, "S" if check is _seconds else "N", **more)


@dataclass(frozen=True)
class ServerOptions:
    """A server's address, API key and limits; docs/server.md says more of each.

    Raises:
        OptionError: a value is out of range.
    """

    # fmt: off
    host: str = _server("127.0.0.1", "address to listen on", "ADDRESS")
    port: int = _server(8000, "TCP port; 0 takes a free one", "N", integer(0, 65535))
    model_name: str | None = _server(
        None, "the model's name in requests (default: the directory's name)", "NAME",
        vllm="--served-model-name",
    )
    api_key: str | None = option(None, "server", or_none(_key), repr=False)
    """Bearer token that clients must send; None admits every client."""
    chat_template: Path | None = _server(
        None, "Jinja file to use instead of the checkpoint's chat template", "FILE",
    )
    http: str = _named("auto", HTTP_PARSERS, "uvicorn's parser")
    allowed_hosts: tuple[str, ...] | None = _server(
        None, "names that requests may have in their Host header, separated by commas; * allows "
        "any (default: loopback names, on a loopback address without a key; else any)", "NAMES",
        or_none(_hosts),
    )
    allowed_origins: tuple[str, ...] = _server(
        (), "origins whose web pages may read answers (CORS), separated by commas; * allows any",
        "ORIGINS", _origins, shown="none",
    )
    tool_call_parser: str = _named("auto", PARSERS, "how the model writes tool calls")
    reasoning_parser: str = _named("auto", REASONING, "how the model writes its reasoning")
    log_level: str = _named("info", LOG_LEVELS, "what to log")
    max_tokens: int | None = _limit(
        None, "most new tokens that a request may ask for", or_none(_whole),
        shown="what max-len leaves",
    )
    max_requests: int = _limit(256, "most texts in the engine at once")
    max_queue: int = _limit(
        256, "most texts that wait for the engine; further ones get status 429", integer(0),
    )
    max_body_bytes: int = _limit(
        _TEXT_BODY_BYTES, "largest body of a request",
        shown=f"{_TEXT_BODY_BYTES}; {_IMAGES_BODY_BYTES} with --images",
    )
    max_total_body_bytes: int = _limit(
        2**28, "most bytes of the bodies of all requests together; the largest makes room",
    )
    max_images: int = _limit(16, "most images of a request, with --images")
    max_connections: int = _limit(1024, "most open connections; further ones are closed")
    header_seconds: float = _limit(10, "time limit for the head of a request to arrive", _seconds)
    body_seconds: float = _limit(30, "time limit for the body of a request to arrive", _seconds)
    write_seconds: float = _limit(
        30, "time limit for a client with full buffers to read something", _seconds,
    )
    keep_alive_seconds: float = _limit(
        15, "longest time that a connection is idle between requests", _seconds,
    )
    drain_seconds: float = _limit(
        30, "time limit for running requests to end after SIGTERM", _seconds,
    )
    # fmt: on

    def __post_init__(self) -> None:
        for name, said in declared(ServerOptions):
            said.check(name, getattr(self, name))

    def for_images(self) -> ServerOptions:
        """These options with the default of `max_body_bytes` for a model that takes images."""
        is_default = self.max_body_bytes == _TEXT_BODY_BYTES
        return replace(self, max_body_bytes=_IMAGES_BODY_BYTES) if is_default else self


def require_packages(
    user: str = "the server", names: Sequence[str] = _NEEDED, extra: str = "serve"
) -> None:
    """Check that packages of an extra of mtpc, which `user` needs, are installed, before a
    compilation takes minutes.

    Raises:
        ServingError: one is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ServingError(
            f"{user} needs {', '.join(missing)}, not installed here: pip install 'mtpc[{extra}]'"
        )
