"""What an attacker sends: smuggled requests, floods before the tokenizer, names of other hosts."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from helpers.served import connect, exchange, is_idle, post, read_all, serving, status_of, until
from helpers.small_server import LIMIT, NAME, body, error_of, nothing_is_left, server

import mtpc
from mtpc.errors import OptionError
from mtpc.server.options import ServerOptions
from mtpc.server.run import Running
from mtpc.weights.served_model import ServedModel

__all__ = ["nothing_is_left", "server"]

JSON = "content-type: application/json"


def test_two_lengths_are_refused(server: Running) -> None:
    """Content-Length beside Transfer-Encoding: a proxy may have read another end of the body."""
    smuggled = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    first = body()
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(first), first)
    head = "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "host: localhost", JSON, "transfer-encoding: chunked"]
    )
    data = f"{head}\r\ncontent-length: {len(chunks)}\r\n\r\n".encode()
    answer = exchange(server, data + chunks + smuggled)
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1, "the smuggled request is not answered"
    old = head.replace("HTTP/1.1", "HTTP/1.0").encode()
    answer = exchange(server, old + b"\r\n\r\n" + chunks + smuggled)
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


HEADS = {
    "another coding": ("1.1", ("host: localhost", "transfer-encoding: gzip, chunked"), (400, 501)),
    "an empty coding": ("1.1", ("host: localhost", "transfer-encoding: ,chunked"), (400, 501)),
    "no host": ("1.1", ("transfer-encoding: chunked",), (400,)),
    "two hosts": ("1.1", ("host: localhost", "host: localhost", "content-length: 0"), (400,)),
    "HTTP/2": ("2.0", ("host: localhost", "content-length: 0"), (400, 505)),
}


@pytest.mark.parametrize("what", HEADS)
def test_heads_that_a_proxy_may_read_otherwise(server: Running, what: str) -> None:
    """Refused by either parser, and nothing behind them is answered."""
    version, lines, statuses = HEADS[what]
    smuggled = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body()), body())
    head = "\r\n".join([f"POST /v1/completions HTTP/{version}", JSON, *lines, "", ""])
    answer = exchange(server, head.encode() + data + smuggled)
    assert status_of(answer) in statuses
    assert answer.count(b"HTTP/1.1 ") == 1


SMUGGLED = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked"
ODD_ENDS: dict[str, tuple[bytes, bytes]] = {
    "a chunk that ends in other bytes": (CHUNKED, b"2\r\n{}XX0\r\n\r\n"),
    "a chunk that ends in a line feed": (CHUNKED, b"2\r\n{}\n0\r\n\r\n"),
    "a line feed in an extension": (CHUNKED, b"2;\n{}\r\n0\r\n\r\n" + b"2\r\n{}\r\n0\r\n\r\n"),
    "a size with a prefix": (CHUNKED, b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a size with a sign": (CHUNKED, b"+2\r\n{}\r\n0\r\n\r\n"),
    "a size of 17 digits": (CHUNKED, b"1" + b"0" * 15 + b"2\r\n{}\r\n0\r\n\r\n"),
    "no last chunk": (CHUNKED, b"2\r\n{}\r\n"),
    "a space before the colon": (b"transfer-encoding : chunked", b"2\r\n{}\r\n0\r\n\r\n"),
    "a tab before the colon": (b"content-length\t: 2", b"{}"),
    "a folded coding": (b"transfer-encoding:\r\n chunked", b"2\r\n{}XX0\r\n\r\n"),
    "a length with a sign": (b"content-length: +2", b"{}"),
    "a length with a space": (b"content-length: 2 0", b"{}"),
    "a length in hexadecimal": (b"content-length: 0x2", b"{}"),
    "a length that is none": (b"content-length: ", b"{}"),
    "two lengths": (b"content-length: 2\r\ncontent-length: 0", b"{}"),
    "two lengths in a line": (b"content-length: 2, 0", b"{}"),
    "a carriage return in a value": (b"x: y\rcontent-length: 2", b"{}"),
    "a zero byte": (b"content-length: 2\x00", b"{}"),
    "two codings": (CHUNKED + b"\r\n" + CHUNKED, b"2\r\n{}\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("what", ODD_ENDS)
def test_bodies_whose_end_is_in_doubt(server: Running, what: str) -> None:
    """They are refused by either parser, and no request hides behind them."""
    line, data = ODD_ENDS[what]
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + JSON.encode() + b"\r\n" + line
    answer = exchange(server, head + b"\r\n\r\n" + data + SMUGGLED)
    assert b" 200 " not in answer, answer
    assert answer.count(b"HTTP/1.1 ") <= 1


def test_heads_of_other_versions(server: Running) -> None:
    """A request line without a version is HTTP/0.9, which knows no headers."""
    assert status_of(exchange(server, b"GET /v1/models\r\n\r\n")) in (400, 505)
    old = b"GET /v1/models HTTP/1.0\r\n\r\n"
    assert status_of(exchange(server, old)) == 200, "it needs no Host header"


def test_a_length_over_the_limit_is_refused_at_once(server: Running) -> None:
    """Before a byte of the body has come."""
    for length in (LIMIT + 1, 10**12):
        data = post(b"").replace(b"content-length: 0", f"content-length: {length}".encode())
        with connect(server) as client:
            client.sendall(data)
            start = time.monotonic()
            client.settimeout(0.8)  # body_seconds is 1.
            assert status_of(client.recv(65536)) == 413
            assert time.monotonic() - start < 0.8


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 3000: 1},
        {"stream": True, "stream_options": {"x" * 3000: 1}},
        {"logit_bias": {"9" * 3000: 1}},
        {"stop": ["x" * 3000, 5]},
        {"temperature": 10**3000},
        {"prompt": [10**3000]},
        {"user": ["x" * 3000]},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_answers_do_not_echo(server: Running, fields: dict[str, Any]) -> None:
    answer = exchange(server, post(body(**fields)))
    assert status_of(answer) == 400
    assert len(json.dumps(error_of(answer))) < 1500


def test_messages_do_not_echo(server: Running) -> None:
    for message in ({"x" * 3000: 1}, {"role": "tool", "content": "x" * 3000}):
        data = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "", **message}]})
        answer = exchange(server, post(data.encode(), "/v1/chat/completions"))
        assert status_of(answer) == 400
        assert len(json.dumps(error_of(answer))) < 1500


def test_names_of_other_hosts(word_spec: mtpc.SpecModel) -> None:
    """A page of evil.example whose name resolves to 127.0.0.1 gets nothing (DNS rebinding)."""

    def get(running: Running, host: str, *more: str) -> int:
        lines = ["GET /v1/models HTTP/1.1", f"host: {host}", "connection: close", *more, "", ""]
        return status_of(exchange(running, "\r\n".join(lines).encode()))

    local = ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "127.8.9.10", "[::1]:1", "a.localhost")
    foreign = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1",
               "[::2]", "", "localhost:8000@evil.example")  # fmt: skip
    with serving(word_spec, model_name=NAME) as running:
        assert [get(running, host) for host in local] == [200] * len(local)
        assert [get(running, host) for host in foreign] == [403] * len(foreign)
        assert httpx.get(f"{running.url}/health", headers={"host": "evil.example"}).is_success
    with serving(word_spec, model_name=NAME, allowed_hosts=("api.example",)) as running:
        hosts = ("api.example", "API.example:443", "localhost", "x.api.example")
        assert [get(running, host) for host in hosts] == [200, 200, 403, 403]
    with serving(word_spec, model_name=NAME, allowed_hosts=("*",)) as running:
        assert get(running, "evil.example") == 200
    with serving(word_spec, model_name=NAME, api_key="k") as running:
        assert get(running, "evil.example", "authorization: Bearer k") == 200
    for odd in (("",), "localhost", ("a b",), (5,)):
        with pytest.raises(OptionError, match="allowed_hosts"):
            ServerOptions(allowed_hosts=odd)


def test_long_prompts_hold_up_nobody(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight that are tokenised for long, and one short one between them."""
    real, gate = ServedModel.encode, threading.Event()

    def slow(self: ServedModel, text: str, special_tokens: bool = True) -> list[int]:
        if len(text) > 5000:
            assert gate.wait(60)
        return real(self, text, special_tokens)

    monkeypatch.setattr(ServedModel, "encode", slow)
    with serving(word_spec, model_name=NAME) as running:
        long = post(body(prompt=" " * 6000 + "w7", max_tokens=3))
        clients = [connect(running) for _ in range(8)]
        try:
            for client in clients:
                client.sendall(long)
            until(lambda: running.service.in_flight == 8)
            url = f"{running.url}/v1/completions"
            headers = {"content-type": "application/json"}
            answer = httpx.post(url, content=body(max_tokens=5), headers=headers, timeout=20)
            assert answer.json()["usage"]["completion_tokens"] <= 5
        finally:
            gate.set()
        assert [status_of(read_all(client)) for client in clients] == [200] * 8
        for client in clients:
            client.close()


def test_prompts_that_cannot_fit_are_not_tokenised(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: ServedModel, text: str, special_tokens: bool = True) -> list[int]:
        raise AssertionError("it is tokenised")

    monkeypatch.setattr(ServedModel, "encode", never)
    flood = "w7 " * 100_000
    with serving(word_spec, model_name=NAME) as running:
        for path, fields in (
            ("/v1/completions", {"prompt": ["w7", flood]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": flood}]}),
        ):
            data = json.dumps({"model": NAME, **fields}).encode()
            answer = exchange(running, post(data, path))
            assert status_of(answer) == 400
            assert error_of(answer)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_said_all(
    server: Running, word_spec: mtpc.SpecModel, stream: bool
) -> None:
    """It ends its own direction after the request, and reads on: it gets the whole answer."""
    left = server.service.counters.disconnects
    long = body(max_tokens=50, ignore_eos=True, stream=stream)
    wanted = read_answer(server, post(long), is_half_closed=False)
    assert read_answer(server, post(long), is_half_closed=True) == wanted
    kept = post(long).replace(b"connection: close\r\n", b"")
    assert read_answer(server, kept, is_half_closed=True) == wanted, "closed after the answer"
    assert server.service.counters.disconnects == left
    with connect(server) as client:
        client.sendall(post(body(max_tokens=55, ignore_eos=True, n=20)))
        client.shutdown(socket.SHUT_WR)
        until(lambda: server.service.in_flight == 20)
    until(lambda: is_idle(server, word_spec))
    assert server.service.counters.disconnects == left + 1, "gone, although it had half-closed"


def read_answer(running: Running, data: bytes, is_half_closed: bool) -> str:
    """The text of an answer: what a client reads to the end of the connection."""
    with connect(running) as client:
        client.sendall(data)
        if is_half_closed:
            client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    answer = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert status_of(answer) == 200
    return "".join(part.partition('"')[0] for part in answer.decode().split('"text": "')[1:]) or (
        "".join(part.partition('"')[0] for part in answer.decode().split('"text":"')[1:])
    )


def test_a_body_that_the_parser_refuses(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The application has the head already: one answer, uvicorn's, and no error in the log."""
    head = post(b"", "/health").replace(b"content-length: 0", b"transfer-encoding: chunked")
    head = head.replace(b"POST", b"GET")
    for wrong in (b"zz\r\n", b"5\r\nab\r\n0\r\n\r\n", b"-1\r\n"):
        answer = exchange(server, head + wrong)
        assert status_of(answer) == 400
        assert answer.count(b"HTTP/1.1 ") == 1
    assert errors(caplog) == []


def test_garbage_behind_a_request(
    server: Running, word_spec: mtpc.SpecModel, caplog: pytest.LogCaptureFixture
) -> None:
    """The request runs when the parser refuses what follows: no error in the log."""
    whole = post(body(max_tokens=20, ignore_eos=True)).replace(b"connection: close\r\n", b"")
    for wrong in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
        answer = exchange(server, whole + wrong)
        assert 1 <= answer.count(b"HTTP/1.1 ") <= 2
    until(lambda: is_idle(server, word_spec))
    assert errors(caplog) == []


def test_a_client_that_ends_within_a_body(word_spec: mtpc.SpecModel) -> None:
    """It can never complete it, so nothing waits for the rest."""
    with serving(word_spec, model_name=NAME) as running, connect(running) as client:
        client.sendall(post(body())[:-5])
        client.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        assert read_all(client) == b""
        assert time.monotonic() - start < 10


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno > logging.WARNING]
