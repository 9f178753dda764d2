"""Many streams with random cancels, and the end of a server that is a process of its own."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from helpers.places import ROOT
from helpers.served import is_idle, process, serving, until
from helpers.word_model import words

import mtpc
from mtpc.server.run import Running

NAME = "tiny"
STREAMS = 64
Wanted = dict[tuple[int, ...], str]


def wanted_texts(spec: mtpc.SpecModel, draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of all kinds, with the text that each gets offline."""
    requests = []
    for number in range(count):
        ids = [draw.randrange(6, 90) for _ in range(draw.randrange(1, 20))]
        new = draw.randrange(1, 24)
        seed = number if number % 3 else None
        stop = f" w{draw.randrange(10, 20)}" if number % 4 == 0 else None
        params: dict[str, Any] = {"temperature": 1.2, "seed": seed} if seed is not None else {}
        whole = spec.generate(words(ids), new, ignore_eos=True, stop=stop or (), **params)
        fields = {"prompt": words(ids), "max_tokens": new, "temperature": 0, **params}
        requests.append({"fields": {**fields, "stop": stop}, "text": whole})
    return requests


async def stream_once(
    client: openai.AsyncOpenAI, request: dict[str, Any], leave_after: int | None
) -> bool:
    """One stream, left after some chunks or read to its end; whether it came to its end."""
    stream = await client.completions.create(
        model=NAME, stream=True, extra_body={"ignore_eos": True}, **request["fields"]
    )
    text, chunks = "", 0
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            chunks += 1
            if chunks == leave_after:
                break
        else:
            assert text == request["text"]
            assert chunk.choices[0].finish_reason in ("stop", "length")
            return True
    assert request["text"].startswith(text)
    return False


async def load(
    running: Running, requests: list[dict[str, Any]], seconds: float, draw: random.Random
) -> tuple[int, int, int]:
    """STREAMS at once until time is up: how many were complete, left, and cancelled outright."""
    end = time.monotonic() + seconds
    counts = [0, 0, 0]
    limits = httpx.Limits(max_connections=STREAMS + 8)
    async with (
        httpx.AsyncClient(limits=limits, timeout=120) as http,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", http_client=http,
                           max_retries=0) as client,
    ):  # fmt: skip

        async def one(seed: int) -> None:
            mine = random.Random(seed)
            while time.monotonic() < end:
                request = mine.choice(requests)
                kind = mine.random()
                if kind < 0.2:  # Wherever it is: connecting, waiting, decoding.
                    task = asyncio.create_task(stream_once(client, request, None))
                    await asyncio.sleep(mine.random() * 0.5)
                    counts[1 + task.cancel()] += 1
                    await asyncio.gather(task, return_exceptions=True)
                    if not task.cancelled() and task.exception():
                        raise task.exception()
                    continue
                leave_after = mine.randrange(1, 6) if kind < 0.4 else None
                counts[not await stream_once(client, request, leave_after)] += 1

        await asyncio.gather(*(one(draw.randrange(2**32)) for _ in range(STREAMS)))
    return counts[0], counts[1], counts[2]


@contextmanager
def tiny_server(spec: mtpc.SpecModel) -> Iterator[Running]:
    with serving(spec, model_name=NAME, max_requests=24, max_queue=200) as running:
        yield running


def run_load(spec: mtpc.SpecModel, seconds: float, seed: int) -> None:
    draw = random.Random(seed)
    requests = wanted_texts(spec, draw, 16)
    assert any(len(r["text"]) > 0 for r in requests if r["fields"]["stop"])
    preemptions = spec.stats.preemptions
    with tiny_server(spec) as running:
        start = time.monotonic()
        complete, left, cancelled = asyncio.run(load(running, requests, seconds, draw))
        print(f"{time.monotonic() - start:.1f} s")
        until(lambda: is_idle(running, spec), 60)
        assert not running.service.in_flight
        print(f"{complete} complete, {left} left, {cancelled} cancelled")
    assert complete > 20
    assert left > 5
    assert cancelled > 5
    assert spec.stats.preemptions > preemptions, "the pool was under pressure"


def test_many_streams(word_spec: mtpc.SpecModel) -> None:
    """64 at once, some of them left: each text is the offline one, and nothing is left over."""
    run_load(word_spec, 3, seed=1)


@pytest.mark.slow
def test_many_streams_for_minutes(word_spec: mtpc.SpecModel) -> None:
    run_load(word_spec, 180, seed=2)


# ---------------------------------------------------------------------------------- the end


def test_sigterm_drains(word_spec: mtpc.SpecModel) -> None:
    """The stream comes to its end, new requests are told, the exit code is 0; then the hard way."""
    directory = word_spec.served.directory
    assert directory is not None
    with process(directory, "--api-key", "k", "--no-sampling") as (server, url):
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        fields: dict[str, Any] = dict(
            model=directory.name, prompt=[7], temperature=0, max_tokens=60, n=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        with client.completions.create(stream=True, **fields) as stream:
            chunks = iter(stream)
            texts = [""] * 8
            first = next(chunks)
            texts[first.choices[0].index] += first.choices[0].text
            server.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            health = httpx.get(url.replace("/v1", "/health"))
            assert (health.status_code, health.headers["retry-after"]) == (503, "1")
            assert health.json()["error"]["code"] == "shutting_down"
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**fields)
            assert refused.value.status_code == 503
            for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        assert set(texts) == {words(word_spec.generate([7], 60, ignore_eos=True))}
        assert server.wait(20) == 0


@pytest.mark.parametrize(("drain_seconds", "stops"), [(0.2, 1), (60, 2)])
def test_second_sigterm_and_drain_seconds(
    word_spec: mtpc.SpecModel, drain_seconds: float, stops: int
) -> None:
    """Streams that do not end in time, or at a second signal, are told so."""
    with serving(word_spec, model_name=NAME, drain_seconds=drain_seconds) as running:
        data = {"model": NAME, "prompt": [7], "max_tokens": 60, "n": 60, "stream": True,
                "ignore_eos": True}  # fmt: skip
        with httpx.stream("POST", f"{running.url}/v1/completions", json=data, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            for _ in range(stops):
                running.stop()
            last = [line for line in lines if line][-1]
        assert (
            json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine was closed"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_drain_waits_for_prompts(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request that was admitted is answered, also one whose prompt is being tokenised."""
    real, has_begun, may_go = word_spec.served.encode, threading.Event(), threading.Event()

    def slow(*given: Any) -> list[int]:
        has_begun.set()
        assert may_go.wait(20)
        return real(*given)

    monkeypatch.setitem(word_spec.served.__dict__, "encode", slow)
    data = {"model": NAME, "prompt": " " * 5000 + "w7", "max_tokens": 20, "temperature": 0,
            "ignore_eos": True, "stream": stream}  # fmt: skip
    with serving(word_spec, model_name=NAME, drain_seconds=60) as running:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{running.url}/v1/completions", json=data, timeout=60)
            assert has_begun.wait(20)
            running.stop()
            until(lambda: running.service.is_draining)
            may_go.set()
            answer = asked.result()
        assert answer.status_code == 200
        chunks = re.findall(r"data: ({.*)", answer.text) if stream else [answer.text]
        text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    monkeypatch.undo()
    assert text == word_spec.generate("w7", 20, ignore_eos=True)


def test_without_the_extra() -> None:
    """One line that names it, before anything is compiled."""
    code = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "hidden = ('starlette', 'uvicorn')\n"
        "util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
        "from mtpc.cli.main import main\n"
        "sys.exit(main(['serve']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the server needs starlette, uvicorn, not installed here: pip install "
        "'mtpc[serve]'\n"
    )
