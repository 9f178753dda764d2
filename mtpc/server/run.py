"""Runs a server: it listens and serves, and on SIGTERM it drains and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from mtpc import AsyncEngine, SpecModel
from mtpc.errors import LostRankError, OptionError, ServingError
from mtpc.server.app import make_app
from mtpc.server.asgi import make_service
from mtpc.server.connections import MAX_HEAD_BYTES, Connections
from mtpc.server.options import ServerOptions
from mtpc.server.service import Service

SEND_BUFFER_BYTES = 2**17
"""The kernel's send buffer of a connection. Without a limit, it grows to megabytes if the client
does not read."""
GRACE_SECONDS = 5
"""Seconds that uvicorn waits for connections to close after the engine has ended."""
BACKLOG = 2048
RATES_SECONDS = 10
"""Seconds between two lines of the log with the engine's throughput."""
log = logging.getLogger("mtpc.server")


@dataclass(frozen=True)
class Running:
    """A server that listens.

    Attributes:
        port: the TCP port that the server uses, also if port 0 was requested.
        stop: begins the shutdown, as SIGTERM does. A second call ends running requests at once. Any
            thread may call it, also after the server has ended.
    """

    host: str
    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], object]

    @property
    def url(self) -> str:
        """The URL for clients, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def run_server(
    model: SpecModel,
    options: ServerOptions,
    ready: Callable[[Running], None],
    listener: socket.socket | None = None,
) -> None:
    """Serve a model until SIGTERM, SIGINT or `Running.stop`.

    Args:
        model: a compiled model. Requests that are not greedy need one compiled with `sampling`.
        options: the server's address and limits.
        ready: called once the server listens.
        listener: the result of `bind`; None binds the address now.

    Raises:
        MtpcError: see `make_service`.
        OptionError: the server cannot listen on the address.
        ServingError: the system lacks memory, descriptors or threads for a server.
        LostRankError: another rank has ended, or no longer answers.
    """
    service = make_service(model, options)
    bound = listener or bind(options)
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # Another process bound the same address and listens already.
        bound.close()
        raise _unavailable(options, error) from None
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
            runner.run(_serve(service, bound, ready))
    except OSError as error:
        raise ServingError(
            f"the server cannot run: {error}; free memory, descriptors or threads of this machine, "
            "and start it again"
        ) from error
    finally:
        bound.close()


def bind(options: ServerOptions) -> socket.socket:
    """Bind the address without listening yet. Accepted connections inherit its send buffer size.

    Raises:
        OptionError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(closing(socket.socket(family, socket.SOCK_STREAM)))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind((options.host, options.port))
            listener.setblocking(False)
        except (OSError, UnicodeError) as error:
            raise _unavailable(options, error) from None
        stack.pop_all()
    return listener


def _unavailable(options: ServerOptions, error: Exception) -> OptionError:
    return OptionError(
        f"cannot listen on {options.host} port {options.port}: {error}; choose another with "
        "--host and --port"
    )


async def _serve(
    service: Service, listener: socket.socket, ready: Callable[[Running], None]
) -> None:
    loop, stopping, at_once = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    faults = list[RuntimeError]()

    def stop() -> None:
        (at_once if stopping.is_set() else stopping).set()

    def stop_from_any_thread() -> None:
        with suppress(RuntimeError):  # The loop is closed: the server has ended by itself.
            loop.call_soon_threadsafe(stop)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # These replace uvicorn's handlers, which would close the port at once.
        if threading.current_thread() is threading.main_thread():
            try:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, stop)
            except RuntimeError as error:  # If this raised, it would end the process.
                faults.append(error)
                stop()
        yield

    parser = import_from_string(HTTP_PROTOCOLS[service.options.http])
    connections = Connections(service.options, parser)
    server = _server(make_app(service, connections, lifespan), service.options, connections)
    async with service.engine, _rates_logged(service):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done() and not faults:
            host, port = listener.getsockname()[:2]
            ready(Running(host, port, service, loop, stop_from_any_thread))
        stopped = asyncio.create_task(stopping.wait())
        lost = asyncio.create_task(_lost_rank(service.engine))
        await asyncio.wait({stopped, lost, serving}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not serving.done():
            await service.drain(at_once)
            server.should_exit = True
        await serving
        if lost.done():
            raise lost.result()
        lost.cancel()
    if faults:
        raise OSError(*faults[0].args)


@asynccontextmanager
async def _rates_logged(service: Service) -> AsyncIterator[None]:
    task = asyncio.create_task(_log_rates(service)) if log.isEnabledFor(logging.INFO) else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _log_rates(service: Service) -> None:
    """Log what the engine does, at intervals, while it does something."""
    engine = service.engine
    last = await engine.call(lambda: replace(engine.engine.stats))
    while True:
        await asyncio.sleep(RATES_SECONDS)
        stats = await engine.call(lambda: replace(engine.engine.stats))
        names = ("prompt_tokens", "emitted_tokens", "decoded_tokens", "request_steps")
        prompt, new, decoded, steps = (getattr(stats, n) - getattr(last, n) for n in names)
        last = stats
        if prompt or new or stats.num_running:
            log.info(
                "%d requests run, %d wait; %.1f tokens/s of prompts, %.1f new, %.2f a step; "
                "%.0f%% of pages in use",
                *(stats.num_running, stats.num_waiting),
                *(prompt / RATES_SECONDS, new / RATES_SECONDS, decoded / max(steps, 1)),
                100 * stats.pages_used / max(stats.num_pages, 1),
            )


async def _lost_rank(engine: AsyncEngine) -> LostRankError:
    """Wait until another rank is lost. No step can run without it, so the server must end."""
    error = await engine.until_ended()
    while not isinstance(error, LostRankError):
        await asyncio.Event().wait()
    return error


def _server(app: Any, options: ServerOptions, connections: Connections) -> uvicorn.Server:
    protocol: Any = connections.protocol
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        # uvicorn takes whole seconds, and 0 would close every connection after one request.
        timeout_keep_alive=max(1, round(options.keep_alive_seconds)),
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)
