"""Checks a request's head: a proxy must not read it in another way than this server."""

from __future__ import annotations

from collections import Counter

from starlette.types import Scope

from mtpc.server.errors import ApiError

_VERSIONS = ("1.0", "1.1")


def head_fault(scope: Scope) -> ApiError | None:
    """The error for a head that could hide a second request from a proxy, or None.

    uvicorn's two parsers accept different heads. These rules of RFC 9112, sections 3.2 and 6.1,
    apply to both. Each refusal closes the connection, so that the bytes after the head are not read
    as a request.
    """
    version = scope["http_version"]
    if version not in _VERSIONS:
        return ApiError(505, f"the version is HTTP/{version}; expected HTTP/1.1", closes=True)
    counts = Counter(name for name, _ in scope["headers"])
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and (version == "1.0" or b"content-length" in counts):
        message = (
            "the request has Transfer-Encoding, and Content-Length or HTTP/1.0; expected one "
            "way to find the end of its body"
        )
        return ApiError(400, message, code="ambiguous_length", closes=True)
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        message = "Transfer-Encoding names another coding than chunked; send the body as it is"
        return ApiError(501, message, code="unknown_coding", closes=True)
    if counts[b"host"] > 1 or (version == "1.1" and not counts[b"host"]):
        message = f"the request has {counts[b'host']} Host headers; expected one"
        return ApiError(400, message, code="ambiguous_host", closes=True)
    return None
