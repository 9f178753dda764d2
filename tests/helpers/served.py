"""Servers for tests, which listen in a thread of this process and always end."""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mtpc
from helpers.places import ROOT
from mtpc.server.options import ServerOptions
from mtpc.server.run import Running, run_server

IDLE_TASKS = 5
"""Number of tasks of an idle server: uvicorn's, the lifespan, and waiting ones of mtpc."""


@contextmanager
def serving(spec: mtpc.SpecModel, **options: Any) -> Iterator[Running]:
    """Run a server on a free port, and check at the end that nothing of it is left."""
    news: queue.Queue[Running | BaseException] = queue.Queue()

    def run() -> None:
        try:
            run_server(spec, ServerOptions(port=0, **options), news.put)
        except BaseException as error:
            news.put(error)

    thread = threading.Thread(target=run, name="server-under-test", daemon=True)
    thread.start()
    running = news.get(timeout=60)
    if isinstance(running, BaseException):
        raise running
    try:
        yield running
    finally:
        running.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
        assert news.empty(), news.get()
        assert is_empty(spec)
        assert running.service.in_flight == 0


def is_empty(spec: mtpc.SpecModel) -> bool:
    """Whether no request holds pages or a request slot."""
    engine = spec.engine
    return (
        not engine.has_work
        and engine.pages.num_free == engine.pages.count
        and engine.slots.num_free == engine.slots.count
    )


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition of another thread is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not get there"
        time.sleep(0.005)


def is_idle(running: Running, spec: mtpc.SpecModel) -> bool:
    """Whether requests have left no pages, request slots, tasks or mailboxes."""
    service = running.service
    tasks = [task for task in asyncio.all_tasks(running.loop) if not task.done()]
    return (
        is_empty(spec)
        and not service.in_flight
        and not service.engine._mailboxes
        and len(tasks) <= IDLE_TASKS
    )


def connect(running: Running, receive_buffer: int | None = None) -> socket.socket:
    """A plain connection."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(30)
    client.connect((running.host, running.port))
    return client


def exchange(running: Running, data: bytes) -> bytes:
    """Send bytes; returns what the server sends until it closes."""
    with connect(running) as client:
        client.sendall(data)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def post(body: bytes, path: str = "/v1/completions", *headers: str) -> bytes:
    """A request's bytes, after which the server closes the connection."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        f"content-length: {len(body)}",
        *(headers or ("content-type: application/json",)),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


COMMAND = [sys.executable, "-m", "mtpc", "serve"]
OPTIONS = ["--backend", "eager", "--spec-tokens", "1", "--batch-buckets", "2", "--port", "0"]
SIZES = ["--max-len", "64", "--page-size", "4", "--prefill-chunk", "8", "--dtype", "float64"]


@contextmanager
def process(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command `mtpc serve`; returns its address."""
    command = [*COMMAND, str(directory), *OPTIONS, *SIZES, *options]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line.startswith(f"mtpc serves {directory.name!r} on http://127.0.0.1:")
        yield server, line.split()[-1]
    finally:
        if server.poll() is None:
            server.kill()
        server.wait(10)
        server.stdout.close()
