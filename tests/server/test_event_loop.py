"""What holds up the event loop: a stop watch on it, over the worst body of each endpoint."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.served import connect, exchange, post, read_all, serving, status_of, until
from helpers.small_server import NAME, body, error_of

import mtpc
from mtpc.errors import OptionError
from mtpc.server.bodies import MOST_MARKS, parse_json
from mtpc.server.errors import ApiError
from mtpc.server.options import ServerOptions
from mtpc.server.run import Running

SIZE = 2**20
"""Bytes of each body: the default limit."""
MOST_S = 0.06
"""Processor time of one turn of the event loop."""


@pytest.fixture(scope="module")
def server(word_spec: mtpc.SpecModel) -> Iterator[Running]:
    with serving(word_spec, model_name=NAME) as running:
        yield running


@pytest.fixture
def longest_s(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """longest_s(): processor time of the longest turn of the server's loop so far, in seconds."""
    real, found = asyncio.events.Handle._run, [0.0]

    def run(handle: Any) -> None:
        start = time.thread_time()
        real(handle)
        if threading.current_thread().name == "server-under-test":
            found.append(time.thread_time() - start)

    monkeypatch.setattr(asyncio.events.Handle, "_run", run)
    gc.disable()  # A round over all objects of the tests is not the server's work.
    yield lambda: max(found)
    gc.enable()


def filled(before: str, each: Callable[[int], str], after: str) -> bytes:
    """A body of nearly SIZE bytes: parts with commas in between."""
    parts, size, number = list[str](), len(before) + len(after), 0
    while size + len(part := each(number)) + 2 < SIZE:
        parts.append(part)
        size += len(part) + 1
        number += 1
    return f"{before}{','.join(parts)}{after}".encode()


def named(number: int, name: str = "") -> str:
    return '{"type":"function","function":{"name":"%s"}}' % (name or f"f{number}")


HELLO = '{"role":"user","content":"w7"}'
CHAT = '{"model":"tiny","max_tokens":1,"temperature":0,"messages":'
COMPLETE = '{"model":"tiny","max_tokens":1,"temperature":0,'
BODIES: dict[str, tuple[str, bytes]] = {
    "tools": ("/v1/chat/completions", filled(f'{CHAT}[{HELLO}],"tools":[', named, "]}")),
    "tools that none uses": (
        "/v1/chat/completions",
        filled(f'{CHAT}[{HELLO}],"tool_choice":"none","tools":[', named, "]}"),
    ),
    "a tool again and again": (
        "/v1/chat/completions",
        filled(f'{CHAT}[{HELLO}],"tools":[', lambda i: named(i, "f"), "]}"),
    ),
    "a choice of no tool": (
        "/v1/chat/completions",
        filled(f'{CHAT}[{HELLO}],"tool_choice":{named(0, "x")},"tools":[', named, "]}"),
    ),
    "messages": ("/v1/chat/completions", filled(f"{CHAT}[", lambda i: HELLO, "]}")),
    "parts": (
        "/v1/chat/completions",
        filled(
            f'{CHAT}[{{"role":"user","content":[', lambda i: '{"type":"text","text":""}', "]}]}"
        ),
    ),
    "images": (
        "/v1/chat/completions",
        filled(
            f'{CHAT}[{{"role":"user","content":[',
            lambda i: '{"type":"image_url","image_url":{"url":"x"}}',
            "]}]}",
        ),
    ),
    "calls": (
        "/v1/chat/completions",
        filled(
            f'{CHAT}[{{"role":"assistant","tool_calls":[',
            lambda i: '{"function":{"name":"f","arguments":""}}',
            "]}]}",
        ),
    ),
    "variables": (
        "/v1/chat/completions",
        filled(f'{CHAT}[{HELLO}],"chat_template_kwargs":{{', lambda i: f'"v{i}":[]', "}}"),
    ),
    "a schema": (
        "/v1/chat/completions",
        filled(
            f'{CHAT}[{HELLO}],"response_format":{{"type":"json_schema","json_schema":'
            '{"schema":{"anyOf":[',
            lambda i: f'{{"const":{i}}}',
            "]}}}}",
        ),
    ),
    "fields": (
        "/v1/chat/completions",
        filled(f"{CHAT}[{HELLO}],", lambda i: f'"field{i}":null', "}"),
    ),
    "biases": (
        "/v1/completions",
        filled(f'{COMPLETE}"prompt":[7],"logit_bias":{{', lambda i: f'"{i}":1', "}}"),
    ),
    "stop strings": (
        "/v1/completions",
        filled(f'{COMPLETE}"prompt":[7],"stop":[', lambda i: f'"{i}"', "]}"),
    ),
    "prompts": ("/v1/completions", filled(f'{COMPLETE}"prompt":[', lambda i: '"w7"', "]}")),
    "ids": ("/v1/completions", filled(f'{COMPLETE}"prompt":[', lambda i: "7", "]}")),
    "rows of ids": ("/v1/completions", filled(f'{COMPLETE}"prompt":[', lambda i: "[7]", "]}")),
    "choices": (
        "/v1/completions",
        filled(
            f'{COMPLETE}"structured_outputs":{{"choice":[', lambda i: f'"{i}"', ']},"prompt":[7]}'
        ),
    ),
    "lists": ("/v1/completions", filled(f'{COMPLETE}"prompt":[', lambda i: "[]", "]}")),
    "deep lists": ("/v1/completions", b"[" * SIZE),
    "escapes": ("/v1/completions", b'{"prompt":"%s"}' % (rb"\u0041" * (SIZE // 6 - 4))),
    "pairs": ("/v1/completions", b'{"prompt":"%s"}' % (rb"\ud83d\ude00" * (SIZE // 12 - 4))),
    "long numbers": (
        "/v1/completions",
        filled(f'{COMPLETE}"prompt":[', lambda i: "9" * 4300, "]}"),
    ),
    "a long fraction": ("/v1/completions", b'{"temperature":1.%s}' % (b"1" * (SIZE - 30))),
    "text": ("/tokenize", b'{"prompt":"%s"}' % (b"w7 " * (SIZE // 3 - 9))),
    "messages to tokenise": ("/tokenize", filled('{"messages":[', lambda i: HELLO, "]}")),
    "tokens": ("/detokenize", filled('{"tokens":[', lambda i: "7", "]}")),
    "wrong tokens": ("/detokenize", filled('{"tokens":[', lambda i: "96", "]}")),
}


@pytest.mark.parametrize("what", BODIES)
def test_no_body_holds_up_the_loop(
    server: Running, longest_s: Callable[[], float], what: str
) -> None:
    """Refused or answered, while the loop does nothing for long."""
    path, data = BODIES[what]
    assert SIZE - 5000 < len(data) <= SIZE
    assert status_of(exchange(server, post(data, path))) in (200, 400)
    assert longest_s() < MOST_S


def test_a_body_of_small_chunks(server: Running, longest_s: Callable[[], float]) -> None:
    """Of one byte each; uvicorn calls for each of them."""
    head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    data = b"".join(b"1\r\n%c\r\n" % each for each in body(user="x" * 50_000)) + b"0\r\n\r\n"
    assert status_of(exchange(server, head + data)) == 200
    assert longest_s() < 3 * MOST_S


def test_the_values_of_large_bodies_are_bounded() -> None:
    """A parse holds the GIL, also in a thread: bodies of images may be large, of values not."""
    image = b'{"x": "data:image/png;base64,%s"}' % (b"QUJD" * 2**21)
    assert len(parse_json(image)["x"]) == 2**23 + 22
    for each in (b"[],", b"0,", b"{},", rb'"\n",', b'"\\\\",'):
        data = b"[%s0]" % (each * (MOST_MARKS // (each.count(b",") + each.count(b"[")) + 1))
        with pytest.raises(ApiError, match="commas, brackets and backslashes") as refused:
            parse_json(data)
        assert refused.value.status == 413
    most = b"[%s0]" % (b"0," * (MOST_MARKS - 1))
    assert len(parse_json(most)) == MOST_MARKS


TOTAL = 3 * 2**20
"""Room for all bodies of the server below, each of at most 1 MiB."""


@pytest.fixture(scope="module", params=["httptools", "h11"])
def full(request: pytest.FixtureRequest, word_spec: mtpc.SpecModel) -> Iterator[Running]:
    options: dict[str, Any] = {"max_total_body_bytes": TOTAL, "http": request.param}
    with serving(word_spec, model_name=NAME, **options) as running:
        yield running


def held_bytes(running: Running) -> int:
    return sum(held.size for held in [*running.service.bodies._held])


@pytest.mark.parametrize("is_chunked", [False, True])
def test_unfinished_bodies_have_a_bound(full: Running, is_chunked: bool) -> None:
    """Of all connections together; the largest ones make room, and small ones get through."""
    size = 900_000
    head, part = post(b"x" * 2**20).partition(b"\r\n\r\n")[0], b" " * size
    if is_chunked:
        head = head.replace(b"content-length: 1048576", b"transfer-encoding: chunked")
        part = b"%x\r\n%s\r\n" % (size, part)
    clients = [connect(full) for _ in range(12)]
    try:
        for client in clients:
            client.sendall(head + b"\r\n\r\n" + part)
        until(lambda: held_bytes(full) == 3 * size)
        assert len(full.service.bodies._held) == 3
        assert status_of(exchange(full, post(body()))) == 200, "a small one has room"
        large = body(user="x" * 950_000)
        assert status_of(exchange(full, post(large))) == 200, "a larger one made room"
        answers = [answer for client in clients if (answer := answered(client))]
        assert len(answers) == 10
        for answer in answers:
            assert status_of(answer) == 429
            assert error_of(answer)["code"] == "too_many_bytes"
            assert b"retry-after: 1" in answer
    finally:
        for client in clients:
            client.close()
    until(lambda: not full.service.bodies._held)


def answered(client: Any) -> bytes:
    """What a client has got until now."""
    client.settimeout(0.5)
    try:
        return client.recv(65536)
    except TimeoutError:
        return b""


def test_bodies_count_until_they_are_prompts(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole bodies wait for threads: they are not dropped, and new ones have no room."""
    gate, real = threading.Event(), parse_json

    def slow(data: bytes) -> Any:
        gate.wait(30)
        return real(data)

    monkeypatch.setattr("mtpc.server.app.parse_json", slow)
    with serving(word_spec, model_name=NAME, max_total_body_bytes=TOTAL) as running:
        data = post(body(user="x" * 1_000_000))
        clients = [connect(running) for _ in range(3)]
        try:
            for client in clients:
                client.sendall(data)
            until(lambda: held_bytes(running) > 3_000_000)
            assert status_of(exchange(running, data)) == 429
        finally:
            gate.set()
        assert [status_of(read_all(client)) for client in clients] == [200] * 3
        for client in clients:
            client.close()
        assert not running.service.bodies._held


def test_one_body_always_has_room() -> None:
    options = ServerOptions(max_total_body_bytes=1, max_body_bytes=4096)
    assert max(options.max_total_body_bytes, options.max_body_bytes) == 4096
    with pytest.raises(OptionError, match="max_total_body_bytes is 0"):
        ServerOptions(max_total_body_bytes=0)


def test_pages(server: Running) -> None:
    """/, /docs and /version, which load nothing from anywhere."""
    for path in ("/", "/docs"):
        page = httpx.get(server.url + path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        for text in ("mtpc serves tiny", "/v1/chat/completions", "The version of mtpc.", "min_p"):
            assert text in page.text
        for text in ("http:", "https:", "src=", "<link", "<script"):
            assert text not in page.text
    assert httpx.get(f"{server.url}/version").json() == {"version": mtpc.__version__}


def test_a_line_for_each_request(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """With its tokens; /health and /metrics only at the level debug."""
    caplog.set_level(logging.INFO, "mtpc.server")
    httpx.post(f"{server.url}/v1/completions", json=json.loads(body(max_tokens=3)))
    httpx.post(f"{server.url}/v1/completions", json=json.loads(body(stream=True)))
    httpx.post(f"{server.url}/v1/completions", json={"nothing": 1})
    httpx.get(f"{server.url}/a%0Ab")
    httpx.get(f"{server.url}/health")
    until(lambda: any("404" in record.getMessage() for record in caplog.records))
    said = [line for r in caplog.records if "/version" not in (line := r.getMessage())]
    for line, start, end in zip(
        said,
        ("POST /v1/completions 200", "POST /v1/completions 200", "POST /v1/completions 400", "GET"),
        ("3 new", "4 new", " s", " s"),
        strict=True,
    ):
        assert line.startswith(f"127.0.0.1 {start}")
        assert line.endswith(end)
        assert "\n" not in line
    assert "2 tokens of the prompt (" in said[0]
    assert "/a%0Ab 404" in said[3]


def test_throughput_is_logged(
    word_spec: mtpc.SpecModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At intervals, while there is work; nothing of an idle server."""
    monkeypatch.setattr("mtpc.server.run.RATES_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "mtpc.server")
    with serving(word_spec, model_name=NAME) as running:
        time.sleep(0.5)
        assert [r for r in caplog.records if "tokens/s" in r.getMessage()] == []
        assert status_of(exchange(running, post(body(max_tokens=30, ignore_eos=True)))) == 200
        until(lambda: any("tokens/s of prompts" in r.getMessage() for r in caplog.records))
