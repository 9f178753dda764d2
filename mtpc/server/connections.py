"""What a connection may take: time for a request's head, time to read an answer, and memory.

uvicorn's protocols have no such limits. A `GuardedProtocol` stands between the transport and one
of them and hands everything on; that a request has begun and ended it hears from the application,
by the client's address.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, MutableMapping
from typing import Any, cast

from mtpc.server.bodies import DISCARDED
from mtpc.server.options import ServerOptions

MAX_HEAD_BYTES = 2**16
"""Of a request line and headers."""
Ends = tuple[tuple[str, int], tuple[str, int]]
"""The client's address and port, and ours: together they are one connection's alone."""


class Connections:
    """All open connections.

    Args:
        options: limits.
        make: uvicorn's protocol, made with the arguments uvicorn gives.
    """

    def __init__(self, options: ServerOptions, make: Callable[..., asyncio.Protocol]):
        self.options, self._make = options, make
        self.by_ends: dict[Ends, GuardedProtocol] = {}
        self.timed_out = 0
        self.refused = 0

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """One for a new connection; uvicorn calls this as if it were its protocol's class."""
        return cast(asyncio.Protocol, GuardedProtocol(self, self._make(**arguments)))

    def begin(self, scope: MutableMapping[str, Any]) -> GuardedProtocol | None:
        """A request's head has arrived; None where its connection is gone already."""
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None:
            return None
        connection = self.by_ends.get((tuple(client), tuple(server)))
        if connection is not None:
            connection.begin()
        return connection


class GuardedProtocol:
    """One connection; an `asyncio.Protocol` in all but inheritance."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol):
        self._all, self._inner = connections, inner
        self._options = connections.options
        self._transport: Any = None
        self._ends: Ends | None = None
        self._is_refused = self._is_paused = self._is_lingering = False
        # A client may send the next request before the application has left the one before.
        self._num_requests = 0
        # What came since the last head, or since the body behind it, was complete.
        self._head_bytes, self._is_body_read = 0, True
        self._unsent: float = math.inf
        self._head_timer = _Timer(self._options.header_seconds, self._give_up)
        self._write_timer = _Timer(self._options.write_seconds, self._give_up_unread)
        self._linger_timer = _Timer(self._options.header_seconds, self._end_lingering)

    def connection_made(self, transport: Any) -> None:
        """Take it, or close it where there are too many."""
        self._transport = transport
        if len(self._all.by_ends) >= self._options.max_connections:
            self._is_refused = True
            self._all.refused += 1
            transport.abort()
            return
        peer, ours = (transport.get_extra_info(name)[:2] for name in ("peername", "sockname"))
        self._ends = (peer, ours)
        self._all.by_ends[self._ends] = self
        self._head_timer.start()
        self._inner.connection_made(cast(asyncio.Transport, _ClosedByGuard(transport, self)))

    def connection_lost(self, error: Exception | None) -> None:
        """Forget it."""
        if self._is_refused:
            return
        assert self._ends is not None
        if self._all.by_ends.get(self._ends) is self:  # Else its port has a new connection.
            del self._all.by_ends[self._ends]
        self._head_timer.stop()
        self._write_timer.stop()
        self._linger_timer.stop()
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Hand on; bytes are limited always, time where no request is open.

        The body of a request that was answered before it was read may still come: what its
        client writes on must be taken, or the answer is lost.
        """
        if self._is_refused or self._transport.is_closing():
            return
        may_be_body = self._is_lingering or not self._is_body_read
        rest = (DISCARDED + 1) * self._options.max_body_bytes if may_be_body else 0
        if self._head_bytes > MAX_HEAD_BYTES + rest:
            self._transport.abort()
            return
        self._head_bytes += len(data)
        if self._is_lingering:
            return
        if not self._num_requests and not self._head_timer.is_running:
            self._head_timer.start()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Hand on."""
        return None if self._is_refused else self._inner.eof_received()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """End the connection, at once where the client has nothing more to send.

        Else only writing ends here, and what still comes is read and forgotten until the client
        closes (within `header_seconds`): a connection closed before that is reset by what comes,
        and with it the answer is lost (RFC 9112, section 9.6). Asked a second time, as at the
        server's end, it is closed.
        """
        if self._is_lingering or (self._is_body_read and not self._head_bytes):
            self._transport.close()
            return
        if self._transport.is_closing():
            return
        self._is_lingering = True
        self._head_timer.stop()
        self._linger_timer.start()
        self._transport.write_eof()
        self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read, and the buffer is full."""
        self._is_paused = True
        self._time_writing()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It reads on."""
        self._is_paused = False
        self._write_timer.stop()
        self._inner.resume_writing()

    def begin(self) -> None:
        """A request's head is complete, and the application has it."""
        self._num_requests += 1
        self._head_bytes, self._is_body_read = 0, False
        self._head_timer.stop()
        if not self._is_paused:
            self._write_timer.stop()

    def body_read(self) -> None:
        """The request has no body, or the application has all of it: what comes is a next head."""
        self._head_bytes, self._is_body_read = 0, True

    def end(self) -> None:
        """The application is done. What is not yet sent keeps the connection for a while only."""
        self._num_requests -= 1
        if self._num_requests:
            return
        has_begun = self._head_bytes and self._is_body_read and not self._is_lingering
        if has_begun and not self._head_timer.is_running:
            self._head_timer.start()  # Of the next head.
        if self._transport.get_write_buffer_size() and not self._write_timer.is_running:
            self._time_writing()

    def _give_up(self) -> None:
        self._all.timed_out += 1
        self._transport.abort()

    def _end_lingering(self) -> None:
        self._transport.close()  # After what is not yet sent, which has its own timer.

    def _time_writing(self) -> None:
        # How much there is to send is known later: uvicorn may be in the midst of writing.
        self._unsent = math.inf
        self._write_timer.start()

    def _give_up_unread(self) -> None:
        """Wait on for a client that reads, however slowly."""
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent < self._unsent:
            self._unsent = unsent
            self._write_timer.start()
        elif unsent:
            self._give_up()


class _ClosedByGuard:
    """A transport as uvicorn's protocol sees it."""

    def __init__(self, transport: Any, guard: GuardedProtocol):
        self._transport, self._guard = transport, guard
        self.close = guard.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._guard.is_closing


class _Timer:
    """Calls back once, if it is not stopped before."""

    def __init__(self, seconds: float, callback: Callable[[], None]):
        self._seconds, self._callback = seconds, callback
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        """From now on, anew if it runs."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._fire)

    def stop(self) -> None:
        """Do not call back."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
