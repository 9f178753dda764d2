"""What the server is made of, without one: answers, the engine's seams, options."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from helpers.places import ROOT
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

import mtpc
from mtpc.cli import serve
from mtpc.cli.arguments import parse
from mtpc.cli.compile_arguments import given_fields
from mtpc.cli.demo import demo_checkpoint
from mtpc.cli.main import main
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.text import TextAssembler
from mtpc.errors import OptionError, RequestError
from mtpc.sampling_params import TokenLogprobs
from mtpc.server.answers import Answer, Chunks, Piece
from mtpc.server.counters import Histogram
from mtpc.server.fields import NO_OPS, ONE_VALUE, USED
from mtpc.server.hosts import is_local
from mtpc.server.options import ServerOptions
from mtpc.server.run import run_server
from mtpc.weights.served_model import ServedModel

PAGE = ROOT / "docs" / "server.md"


# --------------------------------------------------------------------------------- answers


def answer(**changes: Any) -> Answer:
    values: dict[str, Any] = dict(
        is_chat=True, model='a "b"\n', decode=lambda ids: "é" if ids == [1] else "\ufffd",
        wants_logprobs=True, wants_usage=False,
    )  # fmt: skip
    return Answer(**{**values, **changes})


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_chunks_are_json(is_chat: bool, wants_usage: bool) -> None:
    """However they are put together; odd texts and names survive."""
    chunks = Chunks(answer(is_chat=is_chat, wants_usage=wants_usage), 3)
    entries = [TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5)))]
    text = 'x"\n\u2028\U0001f600'
    events = chunks.encode(Piece(text, entries, None)) + chunks.encode(Piece("", (), "stop"))
    assert events.isascii()
    parts = [json.loads(e.removeprefix("data: ")) for e in events.decode().split("\n\n") if e]
    assert all(("usage" in part) == wants_usage and part["model"] == 'a "b"\n' for part in parts)
    choices = [choice for part in parts for choice in part["choices"]]
    assert {choice["index"] for choice in choices} == {3}
    if is_chat:
        assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
        said = [choice["delta"]["content"] for choice in choices]
        (entry,) = choices[0]["logprobs"]["content"]
        assert entry["bytes"] == list("é".encode())
        assert entry["top_logprobs"][1] == {"token": "\ufffd", "logprob": -1.5, "bytes": None}
    else:
        said = [choice["text"] for choice in choices]
        assert choices[0]["logprobs"]["top_logprobs"] == [{"é": -0.5, "\ufffd": -1.5}]
    assert said == [text, ""]
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert choices[1]["logprobs"] is None


def test_probable_tokens_of_one_text_all_stay() -> None:
    """Halves of characters decode alike, and so may other ids. The emitted token has the text."""
    texts = {1: "é", 2: "\ufffd", 3: "\ufffd", 4: "\ufffd", 5: "é"}
    made = answer(is_chat=False, decode=lambda ids: "".join(texts[i] for i in ids))
    top = ((3, -0.1), (1, -0.5), (5, -1.0), (2, -1.5))
    for emitted, names in (
        (3, ["\ufffd", "é", "token_id:5", "token_id:2"]),
        (5, ["é", "\ufffd", "token_id:1", "token_id:2"]),
        (4, ["\ufffd", "token_id:3", "é", "token_id:5", "token_id:2"]),
    ):
        logprob = dict(top).get(emitted, -9.0)
        (found,) = made.logprobs([TokenLogprobs(emitted, logprob, top)], 0)[0]["top_logprobs"]
        assert [*found] == names
        assert sorted(found.values()) == sorted({emitted: logprob, **dict(top)}.values())
        assert found[texts[emitted]] == logprob


def test_histogram() -> None:
    histogram = Histogram("x_seconds", "Of x.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    (family,) = text_string_to_metric_families("\n".join(histogram.lines()) + "\n")
    found = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert family.type == "histogram"
    assert [found["mtpc:x_seconds_bucket", le] for le in ("1.0", "2.0", "+Inf")] == [2, 3, 4]
    assert found["mtpc:x_seconds_sum", None] == 12.0


# --------------------------------------------------------------------------- engine's seams


def test_tokens_up_to_a_stop_string() -> None:
    """The same count for any grouping of the tokens, those behind the string left out."""
    text = "abcabXYcdeXYf"
    for group in range(1, 14):
        assembler = TextAssembler(lambda ids: "".join(map(chr, ids)), ("XYc", "Yq"))
        ids, out = [ord(c) for c in text], ""
        for begin in range(0, len(ids), group):
            out += assembler.push(ids[begin : begin + group])
        assert (out, assembler.num_tokens) == ("abcab", 8)
    assembler = TextAssembler(lambda ids: "".join(map(chr, ids)))
    assembler.push([97, 98])
    assembler.push([99], last=True)
    assert assembler.num_tokens == 3


def test_calls_between_steps(word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's thread while it runs, also while it is busy; here before and after."""
    monkeypatch.setattr("mtpc.engine.async_engine.MAX_TURN_S", 10)

    async def main() -> None:
        engine = AsyncEngine(word_spec)
        engine._turns = 10**6  # It waits for this loop: a late one finds the request running.
        assert await engine.call(threading.current_thread) is threading.current_thread()
        async with engine:
            outputs = engine.generate([7], 40, stop_ids=())
            await anext(outputs)
            thread = await engine.call(threading.current_thread)
            assert thread.name == "mtpc-engine"
            assert await engine.call(lambda: word_spec.engine.stats.num_running) == 1
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda: 1 // 0)
            given_up = asyncio.create_task(engine.call(threading.current_thread))
            await asyncio.sleep(0)
            given_up.cancel()
            assert (await anext(outputs)).token_ids, "neither of them ended the engine"
            await outputs.aclose()
        assert engine.has_ended
        assert await engine.call(threading.current_thread) is threading.current_thread()

    asyncio.run(main())


def test_decoding_is_the_tokenizers(word_spec: mtpc.SpecModel, tmp_path: Path) -> None:
    """The short way gives what transformers' own method gives, clean-up of spaces included."""
    assert word_spec.served.directory is not None
    for directory in (word_spec.served.directory, demo_checkpoint()):
        for clean in (False, True):
            served = ServedModel("x", 96, (), directory)
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
                directory, clean_up_tokenization_spaces=clean
            )
            served.__dict__["_tokenizer"] = theirs
            for ids in ([5, 7, 0, 8], [11, 17, 90, 14, 3], []):
                assert served.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# --------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 70000}, r"in 0\.\.65535"),
        ({"port": "80"}, "port is '80'"),
        ({"max_requests": 0}, "max_requests is 0; expected an integer >= 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"write_seconds": 0}, "write_seconds is 0; expected a positive number"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan"),
        ({"http": "h2"}, "expected one of auto, httptools, h11"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "a\nb"}, "no HTTP header can carry"),
    ],
)
def test_refused_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServerOptions(**fields)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(["serve", "--port", "0", "--max-queue", "7", "--drain-seconds", "2.5"])
    assert given_fields(args, ServerOptions) == {"port": 0, "max_queue": 7, "drain_seconds": 2.5}
    assert args.sampling is None
    hosts = parse(["serve", "--allowed-hosts", "a.example,b.example"])
    assert given_fields(hosts, ServerOptions) == {"allowed_hosts": ("a.example", "b.example")}
    assert parse(["serve", "--no-sampling"]).sampling is False
    monkeypatch.delenv("MTPC_API_KEY", raising=False)
    assert serve._key(args) is None
    monkeypatch.setenv("MTPC_API_KEY", "from-env")
    assert serve._key(args) == "from-env"
    (tmp_path / "key").write_text("from-file \nmore\n")
    assert serve._key(parse(["serve", "--api-key-file", str(tmp_path / "key")])) == "from-file"
    assert serve._key(parse(["serve", "--api-key", "given"])) == "given"
    with pytest.raises(OptionError, match="cannot read the API key"):
        serve._key(parse(["serve", "--api-key-file", str(tmp_path / "none")]))


def test_no_tokenizer(checkpoint: Callable[..., Path], capsys: Any) -> None:
    """Before anything is compiled, and again before anything is listened on."""
    directory = checkpoint("mimo")
    assert main(["serve", str(directory)]) == 2
    assert "no tokenizer.json; a server needs one" in capsys.readouterr().err
    model: Any = SimpleNamespace(served=ServedModel("it", 96, (), directory))
    with pytest.raises(RequestError, match="it has no tokenizer"):
        run_server(model, ServerOptions(), print)


def test_a_taken_port_is_said_before_compiling(
    word_spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it compiles")

    monkeypatch.setattr(mtpc, "compile", never)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(word_spec.served.directory), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_who_is_warned(capsys: pytest.CaptureFixture[str]) -> None:
    for host, loopback in (("127.0.0.1", 1), ("::1", 1), ("0.0.0.0", 0), ("192.168.1.2", 0)):
        assert is_local(host) == loopback


def test_the_docs_name_every_field_and_option() -> None:
    page = PAGE.read_text()
    for table in (USED, NO_OPS, ONE_VALUE):
        for names in table.values():
            for name in names:
                assert f"`{name}`" in page, name
    for name in ServerOptions.__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}"
        assert f"`{flag}" in page, flag
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"):
        assert path in page


def test_libraries_with_known_holes_are_refused() -> None:
    """Of Jinja's sandbox and of h11's chunks: older ones cannot be installed with `mtpc[serve]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {r.name: r for r in map(Requirement, project["optional-dependencies"]["serve"])}
    assert not needed["jinja2"].specifier.contains("3.1.5")
    assert not needed["h11"].specifier.contains("0.15.0")
