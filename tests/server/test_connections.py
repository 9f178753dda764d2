"""What a server bears of connections: slow, endless, vanishing and far too many ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from helpers.served import connect, exchange, is_idle, post, read_all, serving, status_of, until
from helpers.small_server import LIMIT, NAME, QUICK, body, nothing_is_left, server
from helpers.word_model import words

import mtpc
from mtpc.server.connections import MAX_HEAD_BYTES, Connections, GuardedProtocol
from mtpc.server.options import ServerOptions
from mtpc.server.run import SEND_BUFFER_BYTES, Running

__all__ = ["nothing_is_left", "server"]


def test_slow_heads_and_idle_connections(server: Running) -> None:
    """Nothing, half a head, or a head that grows for ever: closed without an answer."""
    for data in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"):
        start = time.monotonic()
        assert exchange(server, data) == b""
        assert 0.2 < time.monotonic() - start < 5
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal")
        time.sleep(0.1)
        client.sendall(b"th HT")
        assert status_of(read_all(client)) == 200, "and then it is closed"
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        start = time.monotonic()
        assert status_of(read_all(client)) == 200
        assert time.monotonic() - start < 5, "keep_alive_seconds"


def test_heads_of_some_size(server: Running) -> None:
    """Either parser takes nearly 64 KiB, in whatever parts they come."""
    data = post(body(), "/v1/completions", *BIG)
    with connect(server) as client:
        client.sendall(data[:40000])
        time.sleep(0.1)
        client.sendall(data[40000:])
        assert status_of(read_all(client)) == 200
    if server.service.options.http == "h11":
        with connect(server) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nx: ")
            for _ in range(65):
                client.sendall(b"y" * 1010)
            assert status_of(read_all(client)) == 400, "it says so; httptools is just cut off"


BIG = ("content-type: application/json", *(f"x-{i}: {'y' * 990}" for i in range(50)))


def send_endless_head(client: socket.socket) -> int:
    """Header lines until the server closes, or 8,000,000 bytes; returns how many bytes went."""
    sent = 0
    try:
        for number in range(40_000):
            sent += client.send(f"x-{number}: {'y' * 200}\r\n".encode())
            time.sleep(0 if number % 100 else 0.001)
    except OSError:
        pass
    return sent


def test_endless_heads(server: Running) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        sent = send_endless_head(client)
        assert sent < 8_000_000, "closed before all of it; buffers hold less"
        assert b" 200 " not in read_all(client)


@pytest.mark.parametrize("num_reads", [1, 2, 50])
@pytest.mark.parametrize("more", [-1, 0, 1, 200_000])
@pytest.mark.parametrize("behind", [b"", b" " * 200_000, b"GET / HTTP/1.1\r\n" * 9000])
def test_the_limit_of_heads_counts_new_data(num_reads: int, more: int, behind: bytes) -> None:
    """To the byte, in any number of reads, whatever follows the head in the same read."""
    start, end = b"\r\n\r\nGET / HTTP/1.1\r\nx: ", b"\r\n\r\n"
    head = start + b"y" * (MAX_HEAD_BYTES + more - len(start) - len(end)) + end
    size = -(-len(head) // num_reads)
    reads = [head[place : place + size] for place in range(0, len(head), size)]
    reads[-1] += behind

    async def send() -> bool:
        inner, transport = Mock(), Mock()
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = ("127.0.0.1", 1)
        guard = GuardedProtocol(Connections(ServerOptions(), Mock()), inner)
        guard.connection_made(transport)
        for read in reads:
            guard.data_received(read)
            if transport.abort.called:
                return False
        assert [call.args[0] for call in inner.data_received.mock_calls] == reads
        return True

    assert asyncio.run(send()) == (more <= 0)


def test_bodies_and_heads_behind_a_head_are_no_part_of_it(server: Running) -> None:
    """One read has a small head and more than 64 KiB of what follows."""
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connect(server) as client:
        client.sendall(one * 1000 + last)
        assert read_all(client).count(b"HTTP/1.1 200") == 1001


def kept(data: bytes, *where: str) -> bytes:
    return post(data, *where).replace(b"connection: close\r\n", b"")


def read_one(stream: Any) -> tuple[int, bytes]:
    """One answer, after which the connection stays: status and body."""
    status, length = int(stream.readline().split()[1]), 0
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, stream.read(length)


def test_keep_alive_serves_many(server: Running) -> None:
    """On one connection: answers, refusals, and answers again."""
    with connect(server) as client, client.makefile("rb") as stream:
        for data, status in ((body(), 200), (body(), 200), (b"{", 400), (body(), 200)):
            client.sendall(kept(data))
            assert read_one(stream)[0] == status
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_one(stream) == (200, b"")


def test_answers_before_the_body(word_spec: mtpc.SpecModel, server: Running) -> None:
    """Whoever is still writing 256 KiB gets them, and may go on with the same connection."""
    parser = server.service.options.http
    options: dict[str, Any] = dict(model_name=NAME, api_key="k", http=parser)
    key, large = "authorization: Bearer k", b" " * 2**18
    json_type = "content-type: application/json"
    with serving(word_spec, **options) as running:
        for where, status in (
            (("/v1/completions",), 401),
            (("/nowhere", key), 404),
            (("/v1/models", key), 405),
            (("/v1/completions", key, "content-type: text/plain"), 415),
        ):
            head, _, data = kept(large, *where).partition(b"\r\n\r\n")
            with connect(running) as client, client.makefile("rb") as stream:
                client.sendall(head + b"\r\n\r\n" + data[:1000])
                assert read_one(stream)[0] == status
                for begin in range(1000, len(data), 2**14):
                    client.sendall(data[begin : begin + 2**14])
                    time.sleep(0.002)
                client.sendall(kept(body(), "/v1/completions", key, json_type))
                assert read_one(stream)[0] == 200


CUT_OFF = (BrokenPipeError, ConnectionResetError)


def write_on(client: socket.socket) -> None:
    """For ten seconds; what comes after the connection's end is answered by a reset."""
    for _ in range(100):
        client.sendall(b" ")
        time.sleep(0.1)


def test_answers_before_the_body_that_close(server: Running) -> None:
    """Whoever writes on gets them; whoever writes for ever, or nothing more, is cut off."""
    head, _, data = post(b" " * 8 * LIMIT, "/nowhere").partition(b"\r\n\r\n")
    with connect(server) as client:
        client.sendall(head + b"\r\n\r\n" + data[:100])
        time.sleep(0.1)  # The server has answered.
        for begin in range(100, len(data), LIMIT):  # A connection that is reset refuses the second.
            client.sendall(data[begin : begin + LIMIT])
            time.sleep(0.01)
        assert status_of(read_all(client)) == 404
    with connect(server) as client, pytest.raises(CUT_OFF):
        client.sendall(head + b"\r\n\r\n" + data * 1000)
    with connect(server) as client:
        client.sendall(head + b"\r\n\r\n" + data[:100])
        assert status_of(read_all(client)) == 404
        time.sleep(QUICK["header_seconds"])
        with pytest.raises(CUT_OFF):
            write_on(client)


def test_endless_heads_behind_a_request(server: Running, word_spec: mtpc.SpecModel) -> None:
    """While the client's own long request runs: its connection goes, and the request with it."""
    if server.service.options.http == "h11":
        pytest.skip("h11 reads nothing behind a request that runs")
    left = server.service.counters.disconnects
    with connect(server) as client:
        client.sendall(kept(body(max_tokens=55, ignore_eos=True, n=60)))
        until(lambda: server.service.in_flight == 60)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        send_endless_head(client)
        until(lambda: is_idle(server, word_spec))
    assert server.service.counters.disconnects == left + 1


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("stream", [False, True])
def test_disconnects(server: Running, word_spec: mtpc.SpecModel, stream: bool) -> None:
    """While it waits in the queue, while it is prefilled, and while it decodes: all comes back."""
    left = server.service.counters.disconnects
    aborted = word_spec.stats.finished["aborted"]
    long = body(max_tokens=55, ignore_eos=True, stream=stream, n=20)
    for wait_s in (0.0, 0.02, 0.1, 0.2):
        with connect(server) as client:
            client.sendall(post(long))
            until(lambda: server.service.in_flight == 20)
            time.sleep(wait_s)
        until(lambda: is_idle(server, word_spec))
    assert server.service.counters.disconnects == left + 4
    assert word_spec.stats.finished["aborted"] > aborted


def test_slow_readers(word_spec: mtpc.SpecModel) -> None:
    """A client that does not read holds a bounded amount, holds back nobody, and is cut off."""
    name = "m" * 3000  # It is in every chunk.
    long = body(model=name, stream=True, n=8, max_tokens=50, ignore_eos=True)
    with serving(word_spec, model_name=name, write_seconds=0.5) as running:
        with connect(running, receive_buffer=4096) as client:
            client.sendall(post(long))
            until(lambda: running.service.in_flight == 8)
            url = f"{running.url}/v1/completions"
            answer = httpx.post(url, content=body(model=name), headers=JSON, timeout=30)
            assert answer.json()["choices"][0]["text"] == words(word_spec.generate([7, 8], 4))
            until(lambda: running.service.counters.disconnects == 1)
            until(lambda: is_idle(running, word_spec))
            got = read_all(client)
        assert b"[DONE]" not in got
        assert len(got) < 4 * SEND_BUFFER_BYTES
        whole = exchange(running, post(long))
        assert whole.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert len(whole) > len(got)


def test_slow_readers_of_whole_answers(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is complete, the client is not interested: its connection goes."""
    monkeypatch.setattr("mtpc.server.run.SEND_BUFFER_BYTES", 4096)
    real, is_cut = GuardedProtocol._give_up, threading.Event()

    def noted(self: GuardedProtocol) -> None:
        real(self)
        is_cut.set()

    monkeypatch.setattr(GuardedProtocol, "_give_up", noted)
    whole = body(n=4, max_tokens=50, ignore_eos=True, logprobs=5)
    with serving(word_spec, model_name=NAME, write_seconds=0.3) as running:
        keep = post(whole).replace(b"connection: close", b"connection: keep-alive")
        with connect(running, receive_buffer=4096) as client:
            client.sendall(keep)
            until(lambda: "200" in str(dict(running.service.counters.responses)))
            assert is_cut.wait(20)
            got = read_all(client)
        assert got.startswith(b"HTTP/1.1 200")
        assert not got.endswith(b"}}")
        assert exchange(running, post(whole)).endswith(b"}}")


def test_too_many_connections(word_spec: mtpc.SpecModel) -> None:
    with serving(word_spec, model_name=NAME, max_connections=3) as running:
        held = [connect(running) for _ in range(3)]
        time.sleep(0.1)
        with connect(running) as extra:
            assert read_all(extra) == b""
        held.pop().close()
        until(lambda: _is_served(running))
        for client in held:
            client.close()


def _is_served(running: Running) -> bool:
    try:
        return httpx.get(f"{running.url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_other_addresses(word_spec: mtpc.SpecModel) -> None:
    """IPv6 where the machine has it; limits find their connection there, too."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(word_spec, model_name=NAME, host="::1", header_seconds=1.0) as running:
        assert running.url.startswith("http://[::1]:")
        long = dict(model=NAME, prompt=[7], max_tokens=55, n=20, temperature=0, ignore_eos=True)
        answer = httpx.post(f"{running.url}/v1/completions", json=long, timeout=60)
        assert len(answer.json()["choices"]) == 20, "longer than header_seconds"
