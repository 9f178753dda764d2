"""A server with small limits and short timeouts, and requests for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import mtpc
from helpers.served import is_idle, serving, until
from mtpc.server.run import Running

NAME = "tiny"
LIMIT = 4096
QUICK = dict(header_seconds=1.0, body_seconds=1.0, write_seconds=1.0, keep_alive_seconds=1)
"""Not shorter, because a garbage collection may take half a second."""


@pytest.fixture(scope="module", params=["httptools", "h11"])
def server(request: pytest.FixtureRequest, word_spec: mtpc.SpecModel) -> Iterator[Running]:
    """Each of uvicorn's parsers has its own code for most of this."""
    options: dict[str, Any] = {**QUICK, "max_body_bytes": LIMIT, "http": request.param}
    with serving(word_spec, model_name=NAME, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, word_spec: mtpc.SpecModel) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        until(lambda: is_idle(request.getfixturevalue("server"), word_spec))


def body(**fields: Any) -> bytes:
    fields = {"model": NAME, "prompt": [7, 8], "max_tokens": 4, "temperature": 0, **fields}
    return json.dumps(fields).encode()


def error_of(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
