"""The state of a server: the engine, who is in it, and whether it is ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtpc.engine.async_engine import AsyncEngine
from mtpc.server.chat import ChatTemplate
from mtpc.server.counters import ServerCounters
from mtpc.server.errors import ApiError
from mtpc.server.options import ServerOptions


class Service:
    """One engine behind one server.

    Args:
        engine: started by `run`.
        model_name: what requests call it.
        options: limits.
        template: the model's chat template, where it has one.

    Attributes:
        is_draining: no new requests are taken; those that run go on.
        in_flight: choices that wait or run.
        counters: of HTTP.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model_name: str,
        options: ServerOptions,
        template: ChatTemplate | None,
    ):
        self.engine, self.model_name = engine, model_name
        self.options, self.template = options, template
        self.counters = ServerCounters()
        self.created = int(time.time())
        self.is_draining = False
        self.in_flight = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def check_ready(self) -> None:
        """Whether requests can be served.

        Raises:
            ApiError: 503, the server is ending or its engine has failed.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.engine.has_ended:
            message = "the engine has failed; the server must be started again"
            raise ApiError(503, message, code="engine_ended")

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Room for that many choices.

        Raises:
            ApiError: 429, too many are here; 400, so many never fit; 503, see `check_ready`.
        """
        self.check_ready()
        most = self.options.most_choices
        if count > most:
            raise ApiError(400, f"the request makes {count} texts; this server has room for {most}")
        if self.in_flight + count > most:
            raise ApiError(
                429,
                f"{self.in_flight} texts are being generated or wait; this server has room for "
                f"{most}: come again later",
                code="too_many_requests",
            )
        self.in_flight += count
        self._is_idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if not self.in_flight:
                self._is_idle.set()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take no more requests, wait for those that run, then end the engine.

        After `drain_seconds`, or once `at_once` is set, the rest is told that the engine was
        closed.
        """
        self.is_draining = True
        waiting = [asyncio.create_task(event.wait()) for event in (self._is_idle, at_once)]
        limit = self.options.drain_seconds
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self.engine.aclose()
        if self.in_flight:
            await self._is_idle.wait()

    def metrics(self) -> str:
        """The server's part of /metrics."""
        ready = not self.is_draining and not self.engine.has_ended
        in_flight = float(self.in_flight)
        return self.counters.prometheus(
            {
                "server_ready": ("1 while requests are taken.", float(ready)),
                "server_choices_in_flight": ("Texts being generated or waiting.", in_flight),
            }
        )
