"""Random bytes and fields to a server: refused or answered, never a fault of its own, soon."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.hostile import random_body, random_bytes, random_request
from helpers.served import connect, exchange, is_idle, post, read_all, serving, until
from helpers.word_model import words

import mtpc
from mtpc.server.run import Running

NAME = "tiny"
STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)
GOOD = json.dumps({"model": NAME, "prompt": [7, 8], "max_tokens": 4, "temperature": 0}).encode()


@pytest.fixture(params=["httptools", "h11"])
def server(
    request: pytest.FixtureRequest, word_spec: mtpc.SpecModel, caplog: pytest.LogCaptureFixture
) -> Iterator[Running]:
    """Each of uvicorn's parsers. In the end the server is idle, and has logged no error."""
    options: dict[str, Any] = {"max_body_bytes": 2**16, "http": request.param}
    with serving(word_spec, model_name=NAME, header_seconds=2.0, **options) as running:
        yield running
        until(lambda: is_idle(running, word_spec))
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def is_well(running: Running, spec: mtpc.SpecModel) -> bool:
    """Whether it still gives the model's own text."""
    answer = exchange(running, post(GOOD)).partition(b"\r\n\r\n")[2]
    return json.loads(answer)["choices"][0]["text"] == words(spec.generate([7, 8], 4))


def test_random_bytes(
    server: Running, word_spec: mtpc.SpecModel, chances: Callable[..., Any]
) -> None:
    """Written in pieces, and then half-closed: each request gets one answer at most."""
    seen = Counter[bytes]()
    for number, chance in enumerate(chances()):
        data = random_bytes(chance, GOOD)
        with connect(server) as client:
            try:
                for start in range(
                    0, len(data), size := chance.choice((7, 100, 10**6)) + len(data) // 50
                ):
                    client.sendall(data[start : start + size])
                client.shutdown(socket.SHUT_WR)
            except OSError:  # The server has refused it already.
                pass
            answer = read_all(client)
        found = STATUS.findall(answer)
        seen.update(found)
        assert b"500" not in found, (chance, data, answer)
        assert sum(status != b"100" for status in found) <= 3, (chance, data, answer)
        assert number % 100 or is_well(server, word_spec), chance
    assert {b"200", b"400"} <= seen.keys(), seen


def test_random_bodies(
    server: Running, word_spec: mtpc.SpecModel, chances: Callable[..., Any]
) -> None:
    """Damaged JSON, and parts of it very many times: refused or answered by a loop that goes on."""
    seen = Counter[bytes]()
    for number, chance in enumerate(chances()):
        path, data = random_body(chance, NAME)
        answer = exchange(server, post(data, path))
        (status,) = STATUS.findall(answer.partition(b"\r\n\r\n")[0])
        seen[status] += 1
        assert status in (b"200", b"400", b"404", b"413"), (chance, path, data[:2000], answer)
        assert b"internal_error" not in answer, (chance, path, data[:2000])
        assert number % 100 or is_well(server, word_spec), chance
    assert seen[b"400"] > 3, seen


def test_random_fields(
    server: Running, word_spec: mtpc.SpecModel, chances: Callable[..., Any]
) -> None:
    """An answer, or OpenAI's error object with a message of bounded length."""
    seen = Counter[bytes]()
    for number, chance in enumerate(chances()):
        path, fields = random_request(chance, NAME)
        answer = exchange(server, post(json.dumps(fields).encode(), path))
        head, _, rest = answer.partition(b"\r\n\r\n")
        (status,) = [s for s in STATUS.findall(head) if s != b"100"] or STATUS.findall(rest)
        seen[status] += 1
        where = (chance, path, fields, answer[:2000])
        assert status in (b"200", b"400", b"404"), where
        assert b"internal_error" not in answer, where
        if status != b"200":
            error = json.loads(rest)["error"]
            assert 10 < len(error["message"]) <= 1000, where
        assert number % 100 or is_well(server, word_spec), chance
    assert seen[b"200"] > 3, seen
    assert seen[b"400"] > 3, seen
