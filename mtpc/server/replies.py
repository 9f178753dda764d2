"""Sends an answer while the engine generates it, and aborts it if the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial

from starlette.types import Receive, Scope, Send

from mtpc.server.answers import DONE, Answer, Chunks, Piece, Usage, usage_chunk
from mtpc.server.errors import api_error
from mtpc.server.generation import Job, run_choices
from mtpc.server.service import Service

Note = Callable[[Usage], None]
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events.
]
USAGE = "mtpc.usage"
"""Where a request's scope has the end of its line in the log."""
LONG_PIECE = 64
"""More tokens with log-probabilities than this are encoded outside the event loop."""
log = logging.getLogger("mtpc.server")


class Reply:
    """The answer to one request, as an ASGI application: events, or one body.

    The request arrived at `start_s`, in seconds of `time.perf_counter`. At its end, the reply exits
    its admission to the service.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        answer: Answer,
        is_stream: bool,
        start_s: float,
        admission: AbstractContextManager[object],
    ):
        self._admission = admission
        self._service, self._job, self._answer = service, job, answer
        self._is_stream, self._start_s = is_stream, start_s
        self._has_text = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send the answer. If the client disconnects, abort its choices."""
        with self._admission:
            answer = self._send_events if self._is_stream else self._send_whole
            work = answer(send, partial(self._note_usage, scope))
            if not await _unless_left(work, receive):
                self._service.counters.disconnects += 1
        self._service.counters.request_s.observe(time.perf_counter() - self._start_s)

    def _note_usage(self, scope: Scope, usage: Usage) -> None:
        scope[USAGE] = (
            f": {usage.prompt_tokens} tokens of the prompt ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} new"
        )

    async def _send_whole(self, send: Send, note: Note) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._job.choices]

        async def keep(index: int, piece: Piece) -> None:
            self._note_first()
            pieces[index].append(piece)

        usage = await run_choices(self._service.engine, self._job, keep)
        note(usage)
        body = await asyncio.to_thread(self._answer.whole, pieces, usage)
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send, note: Note) -> None:
        """Send the answer as events.

        The status line goes out with the first event, so an error before that has its own status.
        """
        chunks = [Chunks(self._answer, choice.index) for choice in self._job.choices]
        events = _Events(send)

        async def write(index: int, piece: Piece) -> None:
            self._note_first()
            if len(piece.logprobs) > LONG_PIECE:  # Of a prompt that is echoed.
                await events.write(await asyncio.to_thread(chunks[index].encode, piece))
            elif not piece.is_empty:
                await events.write(chunks[index].encode(piece))

        try:
            usage = await run_choices(self._service.engine, self._job, write)
        except Exception as error:
            if not events.has_begun:
                raise
            response = api_error(error)
            if response.status == 500:
                log.error("a stream failed", exc_info=error)
            # An error takes the place of a chunk.
            await events.write(b"data: " + response.body() + b"\n\n", more=False)
            return
        note(usage)
        last = usage_chunk(self._answer, usage) if self._answer.wants_usage else b""
        await events.write(last + DONE, more=False)

    def _note_first(self) -> None:
        if not self._has_text:
            self._has_text = True
            first_s = time.perf_counter() - self._start_s
            self._service.counters.first_token_s.observe(first_s)


class _Events:
    """A response of server-sent events, to which several choices may write."""

    def __init__(self, send: Send):
        self._send, self._lock = send, asyncio.Lock()
        self.has_begun = False

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send encoded events. Wait if the client does not read."""
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                start = {"type": "http.response.start", "status": 200, "headers": _EVENTS}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _unless_left(work: Awaitable[None], receive: Receive) -> bool:
    """Await the work, or cancel it if the client disconnects. Return whether it was completed.

    Raises:
        Whatever the work raises.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_left(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            await worker  # Raises the work's error.
        return worker.done()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
