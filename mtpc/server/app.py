"""The ASGI application: its paths, the check of the API key, and error responses."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from mtpc import __version__
from mtpc.errors import MtpcError
from mtpc.server.answers import Answer
from mtpc.server.bodies import HeldBody, parse_json
from mtpc.server.connections import Connections, GuardedProtocol
from mtpc.server.errors import ApiError, api_error
from mtpc.server.fields import check_fields
from mtpc.server.generation import Job, make_job
from mtpc.server.heads import head_fault
from mtpc.server.hosts import AllowedHosts
from mtpc.server.lark import Lark
from mtpc.server.pages import docs_page
from mtpc.server.replies import USAGE, Reply
from mtpc.server.service import Service

OPEN_PATHS = ("/health",)
"""Paths that need no API key and no known host."""
ROUTES = (
    ("POST", "/v1/completions", "completions"),
    ("POST", "/v1/chat/completions", "chat"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/{name:path}", "model"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("GET", "/health", "health"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/version", "version"),
    ("GET", "/docs", "docs"),
    ("GET", "/", "docs"),
)
"""Method, path, and the method of `Endpoints`."""
PATHS = tuple(path for _, path, _ in ROUTES if "{" not in path)
QUIET = ("/health", "/metrics")
"""Paths that programs ask for all the time: their requests are logged at the level debug."""
LONG_BODY = 4096
"""A request with a body longer than this, in bytes, is parsed and tokenised outside the event
loop."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger("mtpc.server")
T = TypeVar("T")


async def _in(threads: Executor, work: Callable[[], T]) -> T:
    """Do work in a thread, so that the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _read_fields(endpoint: str, body: bytes) -> tuple[dict[str, Any], set[str]]:
    return check_fields(endpoint, parse_json(body))


class Endpoints:
    """The functions that serve each path, for one service. /docs shows their first lines."""

    def __init__(self, service: Service):
        self._service = service

    async def health(self, request: Request) -> Response:
        """Return 200 while the server accepts requests.

        Raises:
            ApiError: 503, see `Service.check_ready`.
        """
        self._service.check_ready()
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        """The metrics of the engine and the server, in Prometheus' text format."""
        engine = self._service.engine
        text = await engine.call(lambda: engine.engine.stats.prometheus())
        return Response(text + self._service.metrics(), media_type=METRICS_TYPE)

    async def version(self, request: Request) -> Response:
        """The version of mtpc."""
        return JSONResponse({"version": __version__})

    async def docs(self, request: Request) -> Response:
        """A page about this server."""
        paths = [(m, path, inspect.getdoc(getattr(self, name)) or "") for m, path, name in ROUTES]
        first = [(method, path, text.partition("\n")[0]) for method, path, text in paths]
        return HTMLResponse(docs_page(self._service.model_name, __version__, first))

    async def models(self, request: Request) -> Response:
        """The list of models. It has one entry."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of the given name.

        Raises:
            ApiError: 404, the server has another model.
        """
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one prompt or several."""
        return await self._generate(request, is_chat=False)

    async def chat(self, request: Request) -> ASGIApp:
        """Generate the assistant's next message in a conversation."""
        return await self._generate(request, is_chat=True)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or a conversation."""
        service = self._service
        with service.bodies.hold() as held:
            fields = await self._fields("tokenize", request, held)
            if ("prompt" in fields) == ("messages" in fields):
                raise ApiError(400, "expected one of prompt and messages", "prompt", "missing")
            threads = service.renderers if "messages" in fields else service.tokenisers
            return await _in(threads, partial(self._token_ids, fields))

    def _token_ids(self, fields: dict[str, Any]) -> Response:
        service = self._service
        if "prompt" in fields:
            prompt, special_tokens = fields["prompt"], True
        else:
            fields["tool_choice"] = "none"  # The template's prompt is the same with any.
            made = service.conversations.make(fields)
            if made.images:
                raise ApiError(400, "/tokenize takes text only; leave images out", "messages")
            prompt, special_tokens = made.prompt, False
        (ids,) = service.encode([prompt], fields.get("add_special_tokens", special_tokens))
        decode, wants = service.engine.served.decode, fields.get("return_token_strs")
        strings = [decode([i], True) for i in ids] if wants else None
        longest = service.engine.engine.longest
        answer = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, with special tokens."""
        service = self._service
        with service.bodies.hold() as held:
            fields = await self._fields("detokenize", request, held)
            return await _in(service.tokenisers, partial(self._text, fields["tokens"]))

    def _text(self, ids: list[int]) -> Response:
        served = self._service.engine.served
        wrong = next((i for i in ids if not 0 <= i < served.vocab_size), None)
        if wrong is not None:
            message = f"tokens has {wrong}; expected ids below {served.vocab_size}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return JSONResponse({"prompt": served.decode(ids, True)})

    async def _fields(self, endpoint: str, request: Request, held: HeldBody) -> dict[str, Any]:
        service = self._service
        read = partial(
            _read_fields, endpoint, await service.bodies.read(request, held, service.options)
        )
        fields, ignored = await _in(service.parsers, read) if held.size > LONG_BODY else read()
        service.note_ignored(ignored)
        if "model" in fields:
            self._check_model(fields["model"])
        return fields

    async def _generate(self, request: Request, is_chat: bool) -> ASGIApp:
        service, start_s = self._service, time.perf_counter()
        service.check_ready()
        # Shutdown waits for this request from its admission to the end of the reply.
        with service.bodies.hold() as held, ExitStack() as admission:
            fields = await self._fields("chat" if is_chat else "completions", request, held)
            count = fields.get("n", 1) * (1 if is_chat else len(fields["prompt"]))
            admission.enter_context(service.admitted(count))
            make = partial(self._job, fields, is_chat)
            if is_chat or held.size > LONG_BODY:
                job = await _in(service.renderers if is_chat else service.tokenisers, make)
            else:
                job = make()
            answer = Answer(
                is_chat,
                fields["model"],
                job.decode,
                job.choices[0].sampling.logprobs is not None,
                bool(fields.get("stream_options")),
                [choice.prompt_ids for choice in job.choices] if job.returns_ids else (),
            )
            is_stream = bool(fields.get("stream"))
            return Reply(service, job, answer, is_stream, start_s, admission.pop_all())

    def _job(self, fields: dict[str, Any], is_chat: bool) -> Job:
        service, count, made, images = self._service, fields.get("n", 1), None, None
        if is_chat:
            made = service.conversations.make(fields)
            matchers = service.matchers(made.lark, made.param, count)
            ids, images = service.encode_chat(made)
            prompts = [ids]
        else:
            lark, wanted = Lark(service.engine.served.own_tokens), fields.get("structured_outputs")
            grammar = lark.grammar(lark.structured(wanted)) if wanted else None
            count *= len(fields["prompt"])
            matchers = service.matchers(grammar, "structured_outputs", count)
            prompts = service.encode(fields["prompt"])
        most = service.options.max_tokens
        return make_job(fields, prompts, matchers, service.engine, most, made, images)

    def _check_model(self, name: str) -> None:
        known = self._service.model_name
        if name != known:
            shown = name if len(name) <= 100 else f"{name[:97]}..."
            message = f"the model {shown!r} does not exist; this server has {known!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "mtpc",
            "max_model_len": service.engine.engine.longest,
        }


def make_app(
    service: Service, connections: Connections | None, lifespan: Lifespan[Starlette]
) -> Gate:
    """Make the ASGI application. `lifespan` is entered before the first request. Open connections
    are told when a request begins and ends; they are None if another program listens."""
    endpoints = Endpoints(service)
    routes = [Route(path, getattr(endpoints, n), methods=[method]) for method, path, n in ROUTES]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        HTTPException: _http_error,
        ClientDisconnect: _client_left,
        MtpcError: _any_error,
        Exception: _any_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Gate(app, service, connections)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own errors: an unknown path or a wrong method."""
    known = ", ".join(PATHS)
    messages = {
        404: f"there is no path {request.url.path[:100]}; known paths are {known}",
        405: f"{request.url.path} does not take {request.method[:20]}",
    }
    answer = ApiError(error.status_code, messages.get(error.status_code, error.detail))
    headers = {**answer.headers, **(error.headers or {})}
    return Response(answer.body(), answer.status, headers)


async def _client_left(request: Request, error: ClientDisconnect) -> Response:
    """The client has disconnected and does not read this response."""
    return Response(status_code=499)


async def _any_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    if answer.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Response(answer.body(), answer.status, answer.headers)


def _noting_body(scope: Scope, receive: Receive, connection: GuardedProtocol) -> Receive:
    """Wrap `receive`: it also notifies the connection when the request's body has been read."""
    is_read = not any(
        name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]
    )
    if is_read:
        connection.body_read()

    async def read() -> Message:
        nonlocal is_read
        message = await receive()
        if not is_read and message["type"] == "http.request" and not message.get("more_body"):
            is_read = True
            connection.body_read()
        return message

    return read


class Gate:
    """Wraps the application: checks each head, notifies connections and counts responses."""

    def __init__(self, app: ASGIApp, service: Service, connections: Connections | None):
        self._app, self.service, self._connections = app, service, connections
        self._hosts = AllowedHosts(service.options)
        self._origins = service.options.allowed_origins
        key = service.options.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        known = self._connections
        connection = known.begin(scope) if known is not None else None
        if connection is not None:
            receive = _noting_body(scope, receive, connection)
        path, start_s, status = scope["path"], time.perf_counter(), "left"
        label = path if path in PATHS else "other"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                self.service.counters.responses[label, message["status"]] += 1
                if connection is not None:
                    connection.refuse_answer()
            await send(message)

        try:
            error = self._refusal(scope)
            app = self._app
            if error is not None:
                app = Response(error.body(), error.status, error.headers)
            if self._origins:  # Web pages of these origins may read the answer.
                headers, methods = ("authorization", "content-type"), ("GET", "POST")
                app = CORSMiddleware(app, self._origins, methods, headers)
            await app(scope, receive, counted)
        finally:
            if connection is not None:
                connection.end()
            level = logging.DEBUG if path in QUIET else logging.INFO
            if log.isEnabledFor(level):
                said = f"{(scope.get('client') or '?')[0]} {scope['method']} {quote(path)[:100]}"
                usage = scope.get(USAGE, "")
                log.log(
                    level, "%s %s in %.3f s%s", said, status, time.perf_counter() - start_s, usage
                )

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The error for a request that must not reach the application, or None."""
        path, headers = scope["path"], scope["headers"]
        fault = head_fault(scope)
        if fault is not None:
            return fault
        if path not in OPEN_PATHS and not self._hosts.allows(headers):
            message = (
                "the Host header names another server; use the address that this one listens on, "
                "or start it with --allowed-hosts"
            )
            return ApiError(403, message, code="unknown_host")
        # A browser's CORS preflight request has no key.
        is_preflight = bool(self._origins) and scope["method"] == "OPTIONS"
        if not is_preflight and not self._may_pass(path, headers):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            return ApiError(401, message, code="invalid_api_key")
        return None

    def _may_pass(self, path: str, headers: list[tuple[bytes, bytes]]) -> bool:
        if self._key is None or path in OPEN_PATHS:
            return True
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Constant time: it does not depend on where the keys differ.
        is_key = hmac.compare_digest(key.strip(), self._key)
        return is_key and scheme.lower() == b"bearer"
