"""Errors that clients receive: OpenAI's JSON and an HTTP status code."""

from __future__ import annotations

import json
import re

from mtpc.errors import (
    CapacityError,
    GrammarError,
    MtpcError,
    NumericsError,
    RequestError,
    ServingError,
)

RETRY_AFTER_S = 1
"""Seconds after which a client should retry (status 429 and 503)."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_TOO_LONG = "context_length_exceeded"
MAX_SHOWN = 1000
"""The most characters of an error's message. A message may quote what the client sent."""


class ApiError(MtpcError):
    """An error response.

    Args:
        message: what was found, what was expected, and what to do.
        param: the request's field that caused the error, or None.
        code: OpenAI's `code`, a fixed word that programs can compare, or None.
        closes: whether the connection ends with the response, because the server cannot tell where
            the request's body ends.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        closes: bool = False,
    ):
        super().__init__(_shortened(message, MAX_SHOWN))
        self.status, self.code = status, code
        self.param = None if param is None else _shortened(param, 100)
        self.closes = closes or status in (408, 413)

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, fallback)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER_S)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.closes:  # Else the rest of the body would be read as a request.
            headers["connection"] = "close"
        return headers

    def body(self) -> bytes:
        """OpenAI's error object, as JSON."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def _shortened(text: str, most: int) -> str:
    """A text of at most `most` characters. The end stays, because it says what to do."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


def no_token_masks(what: str, param: str) -> ApiError:
    """The error for a request whose field `param` needs token masks, of a model that has none."""
    message = (
        f"{what} needs token masks, which this model was compiled without; start the server "
        "without --no-sampling and --no-structured-outputs"
    )
    return ApiError(400, message, param, "no_token_masks")


def api_error(error: BaseException) -> ApiError:
    """The error response for an exception. Unexpected exceptions do not show their message."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarError) and isinstance(error.__cause__, ApiError):
        return error.__cause__  # A limit of the library, which only this text reached.
    if isinstance(error, RequestError):
        return _refused(str(error))
    for kind, status, code in (
        (CapacityError, 400, _TOO_LONG),
        (NumericsError, 500, "numerics_error"),
        (GrammarError, 500, "grammar_error"),
        (ServingError, 503, "engine_ended"),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, "the server failed; see the server's log", code="internal_error")


def _refused(message: str) -> ApiError:
    """The response for a request that the engine refuses, with the API's field names."""
    if message.startswith("prompt of "):
        return ApiError(400, message.replace("max_new_tokens", "max_tokens"), code=_TOO_LONG)
    names = re.match(r"(max_new_tokens|[a-z]+_[a-z_]+|temperature|seed|stop|logprobs)\b", message)
    param = names[1].replace("max_new_tokens", "max_tokens") if names else None
    return ApiError(400, message.replace("max_new_tokens", "max_tokens"), param)
