"""Reads request bodies with limits on size and time, and parses them as standard JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from mtpc.server.errors import ApiError

DISCARDED = 8
"""If a body is too large, the server reads and discards up to this many times the size limit.
Otherwise a client that is still writing would lose the answer when the connection closes."""


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Read a request's body, which must be declared as JSON.

    Args:
        request: a request whose body has not been read.
        max_bytes: the largest accepted body, in bytes.
        seconds: the time limit for the whole body.

    Raises:
        ApiError: 408 (too slow), 413 (too large), or 415 (not declared as JSON). The last one
            refuses requests that a web page may send to a local server without permission.
        ClientDisconnect: the client disconnected.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, f"content-type is {media or 'missing'}; expected application/json")
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None


def parse_json(body: bytes) -> Any:
    """Parse a body.

    Raises:
        ApiError: 400 (the body is not JSON or not UTF-8).
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # JSON allows an escaped surrogate alone, but UTF-8 cannot encode it; encode() then raises.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.start + 1]
        text = f"the body has {found!a}, half of a pair of surrogates, which is no text alone"
        raise ApiError(400, text, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 19 or int(length) > max_bytes):
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > DISCARDED * max_bytes:
            break
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")
