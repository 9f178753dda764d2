"""A server under mixed traffic for long: what it holds does not grow, and texts stay the same.

MTPC_SOAK_TOKENS=1000000 pytest -n 0 -m slow -rP tests/server/test_soak.py
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.served import connect, exchange, is_idle, post, read_all, serving, status_of, until
from helpers.small_server import NAME, body
from helpers.word_model import SPECIAL, words

import mtpc
from mtpc.server.run import Running

PROMPTS = [[7 + i, 9, 11 + i][: 1 + i % 3] for i in range(12)]
CLIENTS, ROUNDS, SETTLED = 4, 10, 2
"""Threads that send; intervals that are compared; intervals in which caches may still fill."""
BAD = (
    b"\x16\x03\x01 hello\r\n\r\n",
    post(b"{"),
    post(body(prompt=[96])),
    post(body(temperature=-1)),
    post(body(prompt="w7 " * 40_000)),
    post(body(prompt=" " * 6000 + "w7 " * 80)),
    post(body(model="x" * 5000)),
    post(b"x" * 5000, "/nowhere"),
    post(body()).replace(b"host: localhost", b"host: evil.example"),
    post(body()).replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length"),
)


def chat_ids(prompt: list[int]) -> list[int]:
    """What the word model's template makes of a message of these words."""
    return [SPECIAL, 11, *prompt, 91]


class Traffic:
    """Random requests to one server, until it has emitted some number of tokens."""

    def __init__(self, running: Running, spec: mtpc.SpecModel):
        self.running, self.spec = running, spec
        prompts = [*PROMPTS, *map(chat_ids, PROMPTS)]
        self.wanted = {tuple(p): words(spec.generate(p, 24, ignore_eos=True)) for p in prompts}
        self.faults, self.seen = list[str](), Counter[str]()

    def send(self, tokens: int) -> None:
        """Run all clients until this many more tokens are emitted."""
        end = self.spec.stats.emitted_tokens + tokens
        threads = [threading.Thread(target=self._client, args=(i, end)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int, end: int) -> None:
        chance = random.Random(number + end)
        while self.spec.stats.emitted_tokens < end and not self.faults:
            action = chance.choice(
                (self._whole, self._chat, self._half_closed, self._leaves, self._bad)
            )
            try:
                action(chance)
            except Exception as error:
                self.faults.append(f"{action.__name__}: {error!r}")
            self.seen[action.__name__] += 1

    def _request(self, chance: random.Random, **fields: Any) -> tuple[list[int], bytes]:
        prompt = chance.choice(PROMPTS)
        return prompt, post(body(prompt=prompt, max_tokens=24, ignore_eos=True, **fields))

    def _check(self, prompt: list[int], answer: bytes) -> None:
        last = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")[2]
        choice = json.loads(last)["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == self.wanted[tuple(prompt)], (prompt, text)

    def _whole(self, chance: random.Random) -> None:
        prompt, data = self._request(chance)
        self._check(prompt, exchange(self.running, data))

    def _chat(self, chance: random.Random) -> None:
        prompt = chance.choice(PROMPTS)
        fields = {"model": NAME, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        fields["messages"] = [{"role": "user", "content": words(prompt)}]
        answer = exchange(self.running, post(json.dumps(fields).encode(), "/v1/chat/completions"))
        self._check(chat_ids(prompt), answer)

    def _half_closed(self, chance: random.Random) -> None:
        prompt, data = self._request(chance)
        with connect(self.running) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            self._check(prompt, read_all(client))

    def _leaves(self, chance: random.Random) -> None:
        """A stream, or a whole answer, whose client is gone before its end."""
        _, data = self._request(chance, stream=chance.random() < 0.5, n=2)
        with connect(self.running) as client:
            client.sendall(data)
            client.settimeout(chance.random() / 10)
            with suppress(TimeoutError):
                client.recv(300)

    def _bad(self, chance: random.Random) -> None:
        answer = exchange(self.running, chance.choice(BAD))
        assert 400 <= status_of(answer) < 500, answer[:200]


def held(spec: mtpc.SpecModel) -> dict[str, float]:
    """What the process holds while its server is idle."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * resource.getpagesize() / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "pages": spec.engine.pages.num_free,
        "objects": len(gc.get_objects()),
    }


def soak(spec: mtpc.SpecModel, tokens: int) -> list[dict[str, float]]:
    """Send traffic in intervals; what was held after each."""
    with serving(spec, model_name=NAME) as running:
        traffic, rounds = Traffic(running, spec), []
        for _ in range(ROUNDS):
            traffic.send(tokens // ROUNDS)
            assert not traffic.faults, traffic.faults
            until(lambda: is_idle(running, spec), 60)
            rounds.append(held(spec))
        assert len(traffic.seen) == 5
        print(f"{spec.stats.emitted_tokens} tokens, requests: {dict(traffic.seen)}")
        print(*rounds, sep="\n")
    return rounds


def check_flat(rounds: list[dict[str, float]]) -> None:
    """After the first intervals nothing grows."""
    settled, last = rounds[SETTLED], rounds[-1]
    assert last["pages"] == settled["pages"]
    assert last["descriptors"] <= settled["descriptors"] + 2, rounds
    assert last["threads"] <= settled["threads"] + 2, rounds
    assert last["objects"] < settled["objects"] + 5000, rounds
    assert last["MiB"] < settled["MiB"] + 16, rounds


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_nothing_grows(word_spec: mtpc.SpecModel) -> None:
    check_flat(soak(word_spec, int(os.environ.get("MTPC_SOAK_TOKENS", 20_000))))
