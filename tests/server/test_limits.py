"""What a server bears: malformed and oversize requests, full queues, keys, an engine that fails."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from helpers.served import connect, exchange, is_empty, post, read_all, serving, status_of
from helpers.small_server import LIMIT, NAME, QUICK, body, error_of, nothing_is_left, server

import mtpc
from mtpc.server.run import Running

__all__ = ["nothing_is_left", "server"]


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"", "invalid_json", "not JSON"),
        (b'{"model": ', "invalid_json", "not JSON"),
        (b'{"model": "tiny", "temperature": NaN}', "invalid_json", "NaN is not in JSON"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', "invalid_utf8", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', "invalid_utf8", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_json", "body has '\\ud800', half"),
        (b'{"model": "\\udfff", "prompt": "w7"}', "invalid_json", "surrogates"),
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", None, ""),
        (b'{"seed": ' + b"9" * 4000 + b"}", None, ""),
        (b"[1]", None, "a JSON list; expected an object"),
        (b"null", None, "a JSON null; expected an object"),
        (b"1.5", None, "a JSON number; expected an object"),
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
    assert f"within {QUICK['body_seconds']:g} s" in error_of(answer)["message"]
    assert time.monotonic() - start < 5


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
        with pytest.raises(openai.BadRequestError, match="this server allows at most 7"):
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
        assert said["usage"] == {
            **{"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
            "prompt_tokens_details": {"cached_tokens": 0},
        }
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
