"""What a server bears: malformed and oversize requests, slow and vanishing clients, full queues."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from served import (
    connect,
    exchange,
    is_empty,
    is_idle,
    post,
    read_all,
    serving,
    status_of,
    until,
)
from word_model import words

import mtpc
from mtpc.server.run import SEND_BUFFER_BYTES, Running

NAME = "tiny"
LIMIT = 4096
QUICK = dict(header_seconds=0.4, body_seconds=0.4, write_seconds=0.5, keep_alive_seconds=1)


@pytest.fixture(scope="module", params=["httptools", "h11"])
def server(request: pytest.FixtureRequest, word_spec: mtpc.SpecModel) -> Iterator[Running]:
    """Each of uvicorn's parsers has its own code for most of this."""
    options: dict[str, Any] = {**QUICK, "max_body_bytes": LIMIT, "http": request.param}
    with serving(word_spec, model_name=NAME, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, word_spec: mtpc.SpecModel) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        until(lambda: is_idle(request.getfixturevalue("server"), word_spec))


def body(**fields: Any) -> bytes:
    fields = {"model": NAME, "prompt": [7, 8], "max_tokens": 4, "temperature": 0, **fields}
    return json.dumps(fields).encode()


def error_of(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"", "invalid_json", "no JSON"),
        (b'{"model": ', "invalid_json", "no JSON"),
        (b'{"model": "tiny", "temperature": NaN}', "invalid_json", "NaN is not in JSON"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', "invalid_utf8", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', "invalid_utf8", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_json", "surrogates"),
        (b'{"model": "\\udfff", "prompt": "w7"}', "invalid_json", "surrogates"),
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", None, ""),
        (b'{"seed": ' + b"9" * 4000 + b"}", None, ""),
        (b"[1]", None, "a JSON list; expected an object"),
        (b'{"prompt": "w7"}', "missing", "model is missing"),
        (b'{"model": "tiny"}', "missing", "prompt is missing"),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, bytes) else None,
)
def test_malformed_bodies(server: Running, data: bytes, code: str | None, message: str) -> None:
    answer = exchange(server, post(data))
    assert status_of(answer) == 400
    assert message in error_of(answer)["message"]
    assert code is None or error_of(answer)["code"] == code


def test_surrogate_pairs_are_text(server: Running) -> None:
    """Escaped as two halves, as JSON may have it, or as they are."""
    fields = {"model": NAME, "prompt": "w7 \U0001f600", "max_tokens": 4}
    for is_ascii in (True, False):
        data = json.dumps(fields, ensure_ascii=is_ascii).encode()
        assert (rb"\ud83d\ude00" in data) == is_ascii
        assert status_of(exchange(server, post(data))) == 200


def test_no_http(server: Running) -> None:
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"POST\r\n\r\n", b"GET / HTTP/1.1\r\nx y\r\n\r\n"):
        assert status_of(exchange(server, data)) == 400


def test_oversize_bodies(server: Running) -> None:
    """Declared, or found out while it comes; the client that still writes gets its answer."""
    large = body(prompt="w7 " * LIMIT)
    assert len(large) > LIMIT
    answer = exchange(server, post(large))
    assert status_of(answer) == 413
    assert error_of(answer)["code"] == "body_too_large"
    head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunks = b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(6)) + b"0\r\n\r\n"
    assert status_of(exchange(server, head + chunks)) == 413
    asking = post(b"").replace(
        b"content-length: 0", b"content-length: 9999\r\nexpect: 100-continue"
    )
    assert status_of(exchange(server, asking)) == 413
    endless = post(b"").replace(b"content-length: 0", b"content-length: 99999999")
    with connect(server) as client:
        client.sendall(endless)
        for _ in range(9 * LIMIT // 1024):
            client.sendall(b"x" * 1024)
        answer = read_all(client)
    assert status_of(answer) == 413
    fits = body(user="x" * (LIMIT - len(body(user=""))))
    assert len(fits) == LIMIT
    assert status_of(exchange(server, post(fits))) == 200
    assert status_of(exchange(server, post(fits + b" "))) == 413


def test_media_types(server: Running) -> None:
    """What a browser sends across origins without asking is refused."""
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = exchange(server, post(body(), "/v1/completions", f"content-type: {media}"))
        assert status_of(answer) == 415
    good = "content-type: Application/JSON; charset=utf-8"
    assert status_of(exchange(server, post(body(), "/v1/completions", good))) == 200


def test_slow_bodies(server: Running) -> None:
    """408 after body_seconds, however busy the client looks."""
    start = time.monotonic()
    with connect(server) as client:
        client.sendall(post(body())[:-20])
        for _ in range(10):
            client.sendall(b" ")
            time.sleep(0.02)
        answer = read_all(client)
    assert status_of(answer) == 408
    assert "0.4 s" in error_of(answer)["message"]
    assert time.monotonic() - start < 5


def test_slow_heads_and_idle_connections(server: Running) -> None:
    """Nothing, half a head, or a head that grows for ever: closed without an answer."""
    for data in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
        start = time.monotonic()
        assert exchange(server, data) == b""
        assert 0.2 < time.monotonic() - start < 5
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /heal")
        time.sleep(0.1)
        client.sendall(b"th HT")
        assert status_of(read_all(client)) == 200, "and then it is closed"
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
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
    """Header lines until the server closes, or 800,000 bytes; returns how many bytes went."""
    sent = 0
    try:
        for number in range(4000):
            sent += client.send(f"x-{number}: {'y' * 200}\r\n".encode())
            time.sleep(0 if number % 100 else 0.001)
    except OSError:
        pass
    return sent


def test_endless_heads(server: Running) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        sent = send_endless_head(client)
        assert sent < 800_000, "closed before all of it"
        assert b" 200 " not in read_all(client)


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
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
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
        time.sleep(2 * QUICK["header_seconds"])
        client.sendall(b" ")  # It is answered by a reset.
        time.sleep(0.1)
        with pytest.raises(CUT_OFF):
            client.sendall(b" ")


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
    long = body(max_tokens=55, ignore_eos=True, stream=stream, n=8)
    for wait_s in (0.0, 0.02, 0.1, 0.2):
        with connect(server) as client:
            client.sendall(post(long))
            until(lambda: server.service.in_flight == 8)
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
    whole = body(n=4, max_tokens=50, ignore_eos=True, logprobs=5)
    with serving(word_spec, model_name=NAME, write_seconds=0.3) as running:
        keep = post(whole).replace(b"connection: close", b"connection: keep-alive")
        with connect(running, receive_buffer=4096) as client:
            client.sendall(keep)
            until(lambda: "200" in str(dict(running.service.counters.responses)))
            time.sleep(1)
            got = read_all(client)
        assert got.startswith(b"HTTP/1.1 200")
        assert not got.endswith(b"}}")
        assert exchange(running, post(whole)).endswith(b"}}")


def test_too_many_requests(word_spec: mtpc.SpecModel) -> None:
    """Room is counted in texts; who does not fit is told to come again, and then fits."""
    with serving(word_spec, model_name=NAME, max_requests=2, max_queue=2) as running:
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = dict(model=NAME, prompt=[7], temperature=0)
            with client.completions.create(
                **fields, n=4, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
            ) as stream:
                next(iter(stream))
                with pytest.raises(openai.RateLimitError) as refused:
                    client.completions.create(**fields)
                assert refused.value.response.headers["retry-after"] == "1"
                assert refused.value.body["code"] == "too_many_requests"
                assert httpx.get(f"{running.url}/health").status_code == 200
            with pytest.raises(openai.BadRequestError, match="room for 4"):
                client.completions.create(**fields, n=5)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=5) as patient:
            assert patient.completions.create(**fields, max_tokens=3).usage.completion_tokens == 3


def test_limits_on_tokens(word_spec: mtpc.SpecModel) -> None:
    with (
        serving(word_spec, model_name=NAME, max_tokens=7) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="this server gives 7"):
            client.completions.create(model=NAME, prompt="w7", max_tokens=8)
        fields: dict[str, Any] = dict(model=NAME, extra_body={"ignore_eos": True})
        done = client.completions.create(prompt="w7", **fields)
        assert done.usage.completion_tokens == 7
        talk = client.chat.completions.create(
            messages=[{"role": "user", "content": "w7"}], **fields
        )
        assert talk.usage.completion_tokens == 7


def test_longer_than_the_pool(word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_spec.engine.pages, "count", 3)
    with serving(word_spec, model_name=NAME) as running:
        answer = exchange(running, post(body(max_tokens=20)))
        assert status_of(answer) == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
        # Three pages of four, less two rounds of two drafts, leave eight; the chat takes them all.
        models = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert models[0]["max_model_len"] == 8
        talk = {"model": NAME, "messages": [{"role": "user", "content": "w7 w8"}], "temperature": 0}
        said = httpx.post(
            f"{running.url}/v1/chat/completions", json={**talk, "ignore_eos": True}
        ).json()
        assert said["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        monkeypatch.undo()
        assert status_of(exchange(running, post(body(max_tokens=20)))) == 200, "it fits again"


def test_api_keys(word_spec: mtpc.SpecModel) -> None:
    """Everything but /health needs it; a beginning, an end, or another scheme will not do."""
    with serving(word_spec, model_name=NAME, api_key="sésame".encode().hex()) as running:
        key = "sésame".encode().hex()
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="w7", max_tokens=2).choices
        for wrong in ("none", key[:-1], key + "0", key.upper()):
            with (
                openai.OpenAI(base_url=url, api_key=wrong, max_retries=0) as client,
                pytest.raises(openai.AuthenticationError) as refused,
            ):
                client.models.list()
            assert refused.value.body["code"] == "invalid_api_key"
            assert refused.value.response.headers["www-authenticate"] == "Bearer"
        for path in ("/metrics", "/v1/models", "/nowhere"):
            assert httpx.get(running.url + path).status_code == 401
            basic = {"authorization": f"Basic {key}"}
            assert httpx.get(running.url + path, headers=basic).status_code == 401
        assert httpx.get(f"{running.url}/health").status_code == 200
        odd = post(body(), "/v1/completions", "authorization: Bearer \xff\x00\xfe")
        assert status_of(exchange(running, odd)) in (400, 401)


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


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Who waits is told, a stream by an event; then 503 everywhere, /health first of all."""
    real, calls = word_spec.program.run, iter(range(10**6))

    def breaks(key: Any) -> Any:
        if next(calls) == 6:
            raise RuntimeError("the device fell off")
        return real(key)

    with serving(word_spec, model_name=NAME) as running:
        monkeypatch.setattr(word_spec.program, "run", breaks)
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError) as failed:
                for _ in client.completions.create(
                    model=NAME, prompt=[7], max_tokens=50, stream=stream,
                    extra_body={"ignore_eos": True},
                ):  # fmt: skip
                    pass
            assert "the device fell off" in str(failed.value)
            monkeypatch.undo()
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model=NAME, prompt=[7])
            assert refused.value.status_code == 503
            assert refused.value.body["code"] == "engine_ended"
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert "mtpc:server_ready 0.0" in httpx.get(f"{running.url}/metrics").text
    assert is_empty(word_spec)


def test_nonfinite_logits(word_spec: mtpc.SpecModel) -> None:
    """500 for whose they are; the server goes on."""
    weight = word_spec.loaded.target.get_decoder().norm.weight
    kept = weight.detach().clone()
    with serving(word_spec, model_name=NAME) as running:
        weight.data.fill_(float("nan"))
        try:
            answer = exchange(running, post(body(prompt=[9, 9, 9, 9])))
        finally:
            weight.data.copy_(kept)
        assert status_of(answer) == 500
        assert error_of(answer)["code"] == "numerics_error"
        assert status_of(exchange(running, post(body()))) == 200


def test_other_addresses(word_spec: mtpc.SpecModel) -> None:
    """IPv6 where the machine has it; limits find their connection there, too."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(word_spec, model_name=NAME, host="::1", header_seconds=0.3) as running:
        assert running.url.startswith("http://[::1]:")
        long = dict(model=NAME, prompt=[7], max_tokens=55, n=20, temperature=0, ignore_eos=True)
        answer = httpx.post(f"{running.url}/v1/completions", json=long, timeout=60)
        assert len(answer.json()["choices"]) == 20, "longer than header_seconds"


def test_address_in_use(word_spec: mtpc.SpecModel) -> None:
    from mtpc.errors import OptionError
    from mtpc.server.options import ServerOptions
    from mtpc.server.run import bind, run_server

    with bind(ServerOptions(port=0)) as first:
        options = ServerOptions(port=first.getsockname()[1])
        second = bind(options)  # Both compile; the first one to be done has it.
        first.listen()
        with pytest.raises(OptionError, match="cannot listen on"):
            run_server(word_spec, options, print, second)
        assert second.fileno() == -1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1 port {port}"):
            run_server(word_spec, ServerOptions(port=port), print)
    with pytest.raises(OptionError, match="cannot listen on nowhere"):
        run_server(word_spec, ServerOptions(host="nowhere.invalid"), print)
