"""The server as an ASGI application, for programs with their own listener (uvicorn, Ray Serve)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from mtpc import AsyncEngine, SpecModel
from mtpc.errors import OptionError, RequestError
from mtpc.server.app import Gate, make_app
from mtpc.server.chat import load_chat_template
from mtpc.server.options import ServerOptions
from mtpc.server.service import Service


def make_service(model: SpecModel, options: ServerOptions) -> Service:
    """Make the state of a server of one model. Its engine has not been started.

    Raises:
        RequestError: the checkpoint has no tokenizer.
        OptionError: the model was compiled with synthetic acceptance.
        CheckpointError: the chat template or the vision tower cannot be read or is invalid.
    """
    served = model.served
    if not served.has_tokenizer or served.directory is None:
        raise RequestError(f"{served.source} has no tokenizer.json; a server needs one")
    if model.stats.synthetic_acceptance_rates:
        raise OptionError("synthetic acceptance gives text that is not the model's; serve without")
    template = load_chat_template(served.directory, options.chat_template)
    engine = AsyncEngine(model, options.max_requests)
    if model.vision is not None:
        model.vision.load()
        options = options.for_images()
    name = options.model_name or served.name
    return Service(engine, name, options, template, model.vision)


def asgi_app(model: SpecModel, options: ServerOptions) -> Gate:
    """All paths of `mtpc serve` as an ASGI application.

    The application's lifespan starts the engine. When it ends, the server refuses new requests,
    waits up to `drain_seconds` for the running ones, and closes the engine. The program that
    listens must run the lifespan, as uvicorn and Ray Serve do.

    That program also sets the limits of connections: `port`, `http`, `max_connections`,
    `header_seconds`, `write_seconds` and `keep_alive_seconds` have no effect. `host` only decides
    which Host headers are allowed by default.

    Args:
        model: a compiled model. Requests that are not greedy need one compiled with `sampling`.
        options: the server's limits.

    Raises:
        MtpcError: see `make_service`.
    """
    service = make_service(model, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.engine:
            yield
            await service.drain(asyncio.Event())

    return make_app(service, None, lifespan)
