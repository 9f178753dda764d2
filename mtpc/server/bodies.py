"""Reading request bodies: bounded in size and time, and no JSON but what the standard has."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from mtpc.server.errors import ApiError

DISCARDED = 8
"""Times the limit that is read of a body too large, and forgotten: clients that are still writing
would lose the answer when the connection closes."""


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """A request's body, declared as JSON.

    Args:
        request: whose body nobody has read.
        max_bytes: the largest that is taken.
        seconds: until it must be here.

    Raises:
        ApiError: 408 (too slow), 413 (too large), 415 (not declared as JSON: what a browser sends
            to a local server unasked is not).
        ClientDisconnect: the client left.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, f"content-type is {media or 'missing'}; expected application/json")
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body was not here within {seconds:g} s") from None


def parse_json(body: bytes) -> Any:
    """What a body says.

    Raises:
        ApiError: 400 (no JSON, no UTF-8).
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # Halves of characters, escaped, are JSON and no text.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if "expect" in request.headers and length.isdecimal() and int(length) > max_bytes:
        raise too_large  # The client asks first.
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
