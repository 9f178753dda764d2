"""Reads request bodies with limits on size, time and memory, and parses them as standard JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from mtpc.server.errors import ApiError
from mtpc.server.options import ServerOptions

DISCARDED = 8
"""If a body is too large, the server reads and discards up to this many times the size limit.
Otherwise a client that is still writing would lose the answer when the connection closes."""
MOST_MARKS = 2**20
"""The most commas, brackets and backslashes of a body. Its parser makes a value or a character for
each, and holds the GIL meanwhile. The bytes of long texts, such as images, cost little."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(eq=False)
class HeldBody:
    """One body that the server holds: its bytes so far, and its time limit while it arrives. Where
    it `is_dropped` to make room for others, its reader raises."""

    size: int = 0
    limit: asyncio.Timeout | None = None
    is_dropped: bool = False

    @property
    def is_arriving(self) -> bool:
        return self.limit is not None and not self.limit.expired()

    def drop(self) -> None:
        if self.is_arriving and self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())
        self.size, self.limit, self.is_dropped = 0, None, True


class Bodies:
    """The bodies that a server holds, of all connections, within a bound on their bytes.

    If a body has no room, the largest one that still arrives makes room. So clients that send large
    bodies and never end them cannot keep out a small one.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._held: set[HeldBody] = set()

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """A context in which a body counts."""
        body = HeldBody()
        self._held.add(body)
        try:
            yield body
        finally:
            self._held.discard(body)

    def add(self, body: HeldBody, count: int) -> None:
        """Count new bytes of a body.

        Raises:
            ApiError: 429, the body has made room for others.
        """
        body.size += 0 if body.is_dropped else count
        while sum(held.size for held in self._held) > self._most_bytes:
            arriving = (held for held in self._held if held.is_arriving)
            max(arriving, key=lambda held: held.size, default=body).drop()
        if body.is_dropped:
            raise self._no_room()

    def _no_room(self) -> ApiError:
        message = f"the bodies of all requests have more than {self._most_bytes} bytes: retry later"
        return ApiError(429, message, code="too_many_bytes", closes=True)

    async def read(self, request: Request, body: HeldBody, options: ServerOptions) -> bytes:
        """Read a request's body (`hold` gave `body`), which must be declared as JSON.

        Raises:
            ApiError: 408 (too slow), 413 (too large), 415 (not declared as JSON), or 429 (all
                bodies together are too large). 415 refuses requests that a web page may send to a
                local server without permission.
            ClientDisconnect: the client disconnected.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, f"content-type is {media or 'missing'}; expected application/json")
        try:
            async with asyncio.timeout(options.body_seconds) as body.limit:
                return await self._read(request, body, options.max_body_bytes)
        except TimeoutError:
            if body.is_dropped:
                raise self._no_room() from None
            message = f"the body did not arrive within {options.body_seconds:g} s"
            raise ApiError(408, message) from None
        finally:
            body.limit = None

    async def _read(self, request: Request, body: HeldBody, max_bytes: int) -> bytes:
        message = f"the body is larger than {max_bytes} bytes"
        too_large = ApiError(413, message, code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 19 or int(length) > max_bytes):
            raise too_large
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= max_bytes:
                chunks.append(chunk)
                self.add(body, len(chunk))
            elif size > DISCARDED * max_bytes:
                break
        if size > max_bytes:
            raise too_large
        return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """Parse a body.

    Raises:
        ApiError: 400 (the body is not JSON or not UTF-8); 413 (it has too many values).
    """
    marks = sum(map(body.count, (b",", b"[", b"{", b"\\"))) if len(body) > MOST_MARKS else 0
    if marks > MOST_MARKS:
        message = f"the body has {marks} commas, brackets and backslashes; expected at most"
        raise ApiError(413, f"{message} {MOST_MARKS}", code="body_too_large")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # JSON allows an escaped surrogate alone, but UTF-8 cannot encode it; encode() then raises.
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.start + 1]
        text = f"the body has {found!a}, half of a pair of surrogates, which is no text alone"
        raise ApiError(400, text, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")
