"""Times and bytes of connections, on a wire that is none and a clock that waits for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mtpc.server.connections import Connections
from mtpc.server.options import ServerOptions


class Wire:
    """A transport that only notes that it was cut."""

    def __init__(self, server: str = "127.0.0.2") -> None:
        self.is_cut, self.unsent, self.server = False, 0, server

    def abort(self) -> None:
        self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_cut

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return {"peername": ("127.0.0.1", 5), "sockname": (self.server, 80)}[name]

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Hurried(asyncio.SelectorEventLoop):
    """A loop whose time passes only where it would sleep: no machine is too slow for it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def hurry(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(main())


SCOPE = {"client": ("127.0.0.1", 5), "server": ("127.0.0.2", 80)}


def connection(options: ServerOptions) -> tuple[Connections, Any, Wire]:
    connections, wire = Connections(options, asyncio.Protocol), Wire()
    protocol = connections.protocol()
    protocol.connection_made(wire)
    return connections, protocol, wire


def test_times_of_a_connection() -> None:
    """Only heads and unread answers are timed, whatever the order of one request's end and the
    next one's begin."""
    options = ServerOptions(header_seconds=0.05, write_seconds=0.05)
    scope = SCOPE

    async def main() -> None:
        connections, protocol, wire = connection(options)
        first = connections.begin(scope)
        protocol.data_received(b"next head")
        second = connections.begin(scope)
        first.end()
        protocol.data_received(b"next body")
        await asyncio.sleep(0.2)
        assert not wire.is_cut, "the second request runs"
        second.end()
        await asyncio.sleep(0.2)
        assert not wire.is_cut, "uvicorn times what is idle"
        protocol.data_received(b"half a head")
        await asyncio.sleep(0.2)
        assert wire.is_cut
        connections, protocol, wire = connection(options)
        connections.begin(scope)
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.2)
        assert not wire.is_cut
        wire.unsent = 1
        protocol.pause_writing()
        await asyncio.sleep(0.2)
        assert wire.is_cut
        connections, protocol, wire = connection(options)
        one = connections.begin(scope)
        one.body_read()
        protocol.data_received(b"half a head, sent too early")
        one.end()
        await asyncio.sleep(0.2)
        assert wire.is_cut, "timed from the end of the request before"
        connections, protocol, wire = connection(options)
        newer = connections.protocol()
        newer.connection_made(Wire())
        protocol.connection_lost(None)
        assert connections.begin(scope) is newer, "another with the same port has come"
        elsewhere = connections.protocol()
        elsewhere.connection_made(Wire("127.0.0.3"))
        assert connections.begin(scope) is newer, "the same port, to another address of ours"
        assert connections.begin({**scope, "server": ("127.0.0.3", 80)}) is elsewhere

    hurry(main)


def test_slow_readers_are_borne() -> None:
    """A client that reads on is waited for, one that stops is not: what counts is progress."""

    async def main() -> None:
        _, protocol, wire = connection(ServerOptions(write_seconds=0.1))
        wire.unsent = 100
        protocol.pause_writing()
        for _ in range(25):
            await asyncio.sleep(0.02)
            assert not wire.is_cut
            wire.unsent -= 1
        await asyncio.sleep(0.4)
        assert wire.is_cut

    hurry(main)


def test_bytes_of_a_connection() -> None:
    """What is no body is bounded while a request runs, too; the rest of an unread body is let in,
    up to some times the limit."""
    options = ServerOptions(max_body_bytes=2**16)
    block = bytes(2**14)

    def taken(protocol: Any, wire: Wire) -> int:
        for count in range(200):
            if wire.is_cut:
                return count
            protocol.data_received(block)
        return 200

    async def main() -> None:
        connections, protocol, wire = connection(options)
        one = connections.begin(SCOPE)
        one.body_read()
        assert taken(protocol, wire) == 5, "a next head, and no end of it"
        connections, protocol, wire = connection(options)
        one = connections.begin(SCOPE)
        assert taken(protocol, wire) == 41, "a body that nobody reads"
        connections, protocol, wire = connection(options)
        one = connections.begin(SCOPE)
        one.end()
        for _ in range(16):
            protocol.data_received(block)
        assert not wire.is_cut, "answered before the body was there"
        connections.begin(SCOPE).body_read()
        assert taken(protocol, wire) == 5

    asyncio.run(main())
