"""Limits of a connection: time for a request's head, time to read an answer, and memory.

uvicorn's protocols have no such limits. A `GuardedProtocol` stands between the transport and one of
uvicorn's protocols, and forwards all calls. The application notifies it when a request begins and
ends, and finds it by the addresses of the client and the server.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast

from mtpc.server.bodies import DISCARDED
from mtpc.server.options import ServerOptions

MAX_HEAD_BYTES = 2**16
"""The largest request line with headers, in bytes."""
_HEAD_END, _END_BYTES = re.compile(rb"[^\r\n]\r?\n\r?\n"), 5
"""A header line and the empty line after it."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response, which clients skip. A closed socket answers it with a reset."""
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 5.0
"""Seconds between two probes: at first, and after some doublings."""
Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of the client and of the server. Together they identify a connection."""


class Connections:
    """All open connections (`by_ends`), with uvicorn's protocols, which `make` makes."""

    def __init__(self, options: ServerOptions, make: Callable[..., asyncio.Protocol]):
        self.options, self._make = options, make
        self.by_ends: dict[Ends, GuardedProtocol] = {}

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """Make the protocol of a new connection. uvicorn calls this like a protocol class."""
        return cast(asyncio.Protocol, GuardedProtocol(self, self._make(**arguments)))

    def begin(self, scope: MutableMapping[str, Any]) -> GuardedProtocol | None:
        """Record that a request's head has arrived. Returns its connection, or None if that has
        closed."""
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None:
            return None
        connection = self.by_ends.get((tuple(client), tuple(server)))
        if connection is not None:
            connection.begin(scope.get("http_version", "1.1"))
        return connection


class GuardedProtocol:
    """One connection. It has the methods of `asyncio.Protocol` but does not inherit from it."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol):
        self._all, self._inner = connections, inner
        self._options = connections.options
        self._transport: Any = None
        self._ends: Ends | None = None
        self._is_refused = self._is_paused = self._is_lingering = self._is_lost = False
        # A client may send the next request before the application has ended the previous one.
        self._num_requests = 0
        # Bytes that arrived since the last head, or the body after it, was complete.
        self._head_bytes, self._is_body_read, self._last = 0, True, b""
        # The client has closed its sending side. It may still read, or it may be gone.
        self._is_half_closed = False
        self.has_written = False  # Whether uvicorn has written an answer to the last request.
        self._can_probe, self._probe_s = False, _FIRST_PROBE_S
        self._unsent: float = math.inf
        self._head_timer = _Timer(self._options.header_seconds, self._give_up)
        self._write_timer = _Timer(self._options.write_seconds, self._give_up_unread)
        # Closing first sends the unsent data, which have their own timer.
        self._linger_timer = _Timer(self._options.header_seconds, lambda: self._transport.close())
        self._probe_timer = _Timer(_FIRST_PROBE_S, self._probe)

    def connection_made(self, transport: Any) -> None:
        """Register the connection, or close it if there are too many."""
        self._transport = transport
        if len(self._all.by_ends) >= self._options.max_connections:
            self._is_refused = True
            transport.abort()
            return
        peer, ours = (transport.get_extra_info(name)[:2] for name in ("peername", "sockname"))
        self._ends = (peer, ours)
        self._all.by_ends[self._ends] = self
        self._head_timer.start()
        self._inner.connection_made(cast(asyncio.Transport, _ClosedByGuard(transport, self)))

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_refused:
            return
        assert self._ends is not None
        if self._all.by_ends.get(self._ends) is self:  # A new connection may have the same port.
            del self._all.by_ends[self._ends]
        for timer in (self._head_timer, self._write_timer, self._linger_timer, self._probe_timer):
            timer.stop()
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._inner.connection_lost(error)

    def refuse_answer(self) -> None:
        """Tell uvicorn that the answer to the running request is no longer wanted.

        While the application runs, uvicorn's parser may refuse what follows a head, with an answer
        of its own. With the parser h11, the application's answer would then be an error.
        """
        if self.is_closing:
            # With an error, uvicorn leaves closing to the guard.
            self._lose(ConnectionAbortedError("refused"))

    def data_received(self, data: bytes) -> None:
        """Forward data, up to a limit of bytes. Start the head's timer if no request is open.

        A request may be answered before its body is read. The rest of the body must then be read
        and discarded, or the client loses the answer.
        """
        if self._is_refused or self._transport.is_closing():
            return
        if self._is_too_long(data):
            is_head = self._is_body_read and not self._is_lingering
            if is_head:  # h11 says so itself, and closes.
                self._inner.data_received(data[: self._head_room + 1])
            if not (is_head and self.is_closing):
                self._transport.abort()
            return
        self._head_bytes += len(data)
        self._last = (self._last + data[-_END_BYTES:])[-_END_BYTES:]
        if self._is_lingering:
            return
        if not self._num_requests and not self._head_timer.is_running:
            self._head_timer.start()
        self._inner.data_received(data)

    @property
    def _head_room(self) -> int:
        return max(MAX_HEAD_BYTES - self._head_bytes, 0)

    def _is_too_long(self, data: bytes) -> bool:
        """Whether new data exceed the limit of a head, or of a body that is discarded."""
        if self._is_lingering or not self._is_body_read:
            most = MAX_HEAD_BYTES + (DISCARDED + 1) * self._options.max_body_bytes
            return self._head_bytes + len(data) > most
        room = self._head_room
        # A body, or another request, may follow the head's end in the same data.
        return len(data) > room and not _HEAD_END.search(self._last + data[:room])

    def eof_received(self) -> bool | None:
        """The client has closed its sending side. It still gets the answers that it waits for. It
        stays open for them.

        A client that is gone looks the same until something is written to it. So the server writes
        interim responses until the answer begins.
        """
        if self._is_refused or self._is_lingering or not (self._num_requests or self._head_bytes):
            return None
        self._is_half_closed = True
        self._probe_timer.start()
        return True

    def _probe(self) -> None:
        """Find out whether a client that has closed its sending side is still there."""
        if self.has_written or self._transport.is_closing():
            return  # The next write finds it out.
        if not self._can_probe or not self._is_body_read:
            # The head or body is incomplete, or the version is HTTP/1.0, without interim responses.
            self._give_up()
            return
        self._transport.write(_PROBE)
        self._probe_s = min(2 * self._probe_s, _LAST_PROBE_S)
        self._probe_timer.start(self._probe_s)

    @property
    def is_closing(self) -> bool:
        """Whether the server writes nothing more."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection, at once if the client has nothing more to send.

        Otherwise the connection lingers. The server stops writing, and reads and discards data
        until the client closes, for at most `header_seconds`. If it closed at once, the remaining
        data would reset the connection, and the client would lose the answer (RFC 9112, section
        9.6). A second call, for example at shutdown, closes a lingering connection.
        """
        is_over = self._is_lingering or self._is_half_closed
        if is_over or (self._is_body_read and not self._head_bytes):
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
        """The write buffer is full, because the client does not read fast enough."""
        self._is_paused = True
        self._time_writing()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again, and the write buffer has room."""
        self._is_paused = False
        self._write_timer.stop()
        self._inner.resume_writing()

    def begin(self, http_version: str) -> None:
        """Record that a request's head is complete and the application has received it."""
        self._num_requests += 1
        self._can_probe, self.has_written = http_version == "1.1", False
        self._head_bytes, self._is_body_read = 0, False
        self._head_timer.stop()
        if not self._is_paused:
            self._write_timer.stop()

    def body_read(self) -> None:
        """Record that the request's body, if any, is read. The next data are a new head."""
        self._head_bytes, self._is_body_read = 0, True

    def end(self) -> None:
        """Record that the application has ended a request. Unsent data then have a time limit."""
        self._num_requests -= 1
        if self._num_requests:
            return
        if self._is_half_closed:
            self._transport.close()
            return
        has_begun = self._head_bytes and self._is_body_read and not self._is_lingering
        if has_begun and not self._head_timer.is_running:
            self._head_timer.start()  # The next request's head has begun to arrive.
        if self._transport.get_write_buffer_size() and not self._write_timer.is_running:
            self._time_writing()

    def _give_up(self) -> None:
        self._transport.abort()

    def _time_writing(self) -> None:
        # The timer reads the size of the unsent data later, because uvicorn may still be writing.
        self._unsent = math.inf
        self._write_timer.start()

    def _give_up_unread(self) -> None:
        """Close the connection, unless the client has read something since the last check."""
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent < self._unsent:
            self._unsent = unsent
            self._write_timer.start()
        elif unsent:
            self._give_up()


class _ClosedByGuard:
    """The transport that uvicorn's protocol gets. Its `close` and `is_closing` go to the guard."""

    def __init__(self, transport: Any, guard: GuardedProtocol):
        self._transport, self._guard = transport, guard
        self.close = guard.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._guard.is_closing

    def write(self, data: bytes) -> None:
        # If it closes, uvicorn has answered already. More data after `write_eof` would be an error.
        if not self._guard.is_closing:
            self._guard.has_written = True
            self._transport.write(data)

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))


class _Timer:
    """Calls a function once after a number of seconds, unless it is stopped before."""

    def __init__(self, seconds: float, callback: Callable[[], None]):
        self._seconds, self._callback = seconds, callback
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float | None = None) -> None:
        """Start the timer, or restart it if it runs; it may get another number of seconds."""
        self.stop()
        wait_s = self._seconds if seconds is None else seconds
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
