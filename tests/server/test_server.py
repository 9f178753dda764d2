"""`mtpc serve` as clients see it: OpenAI's own Python client, against a listening server."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import httpx
import openai
import pytest
from helpers.openai_client import (
    CHAT,
    CHAT_IDS,
    NAME,
    chat,
    client,
    complete,
    nothing_is_left,
    offline,
    server,
    spec,
)
from helpers.places import ROOT
from helpers.served import is_idle, until
from helpers.word_model import word, words
from prometheus_client.parser import text_string_to_metric_families

import mtpc
from mtpc.server.answers import Answer
from mtpc.server.chat import ChatTemplate
from mtpc.server.run import Running
from mtpc.weights.served_model import ServedModel

__all__ = ["client", "nothing_is_left", "server", "spec"]


# ----------------------------------------------------------------------------- completions


def test_completion(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """Text prompts get the tokenizer's first token; the text is what generate says."""
    done = complete(client, "w7 w8 w9")
    expected = offline(spec, [0, 7, 8, 9])
    assert done.choices[0].text == words(expected) == spec.generate("w7 w8 w9", 12)
    assert done.choices[0].finish_reason == ("stop" if 1 in expected else "length")
    assert done.object == "text_completion"
    assert done.model == NAME
    assert done.usage.prompt_tokens == 4
    assert done.usage.completion_tokens == len(expected)
    assert done.usage.total_tokens == 4 + len(expected)


def test_usage_counts_reused_tokens(client: openai.OpenAI) -> None:
    """Of 13 tokens, two pages of four have the two tokens of the drafts behind them."""
    ids = [90 - 2 * i for i in range(13)]
    for cached in (0, 8):
        done = complete(client, ids, max_tokens=2, n=2)
        assert done.usage.prompt_tokens == 13
        assert done.usage.prompt_tokens_details.cached_tokens == cached
    streamed = list(complete(client, ids, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1].usage.prompt_tokens_details.cached_tokens == 8


def test_prompts_of_all_kinds(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """Text, texts, ids, rows of ids, both mixed; with n of each, choices in order."""
    for prompt, rows in (
        ("w7", [[0, 7]]),
        (["w7", "w8 w9"], [[0, 7], [0, 8, 9]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ):
        done = complete(client, prompt, n=2, max_tokens=6)
        texts = [words(offline(spec, row, 6)) for row in rows for _ in range(2)]
        assert [choice.text for choice in done.choices] == texts
        assert [choice.index for choice in done.choices] == list(range(len(texts)))
        assert done.usage.prompt_tokens == sum(map(len, rows))


def test_default_lengths(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """16 tokens for completions, what max_len leaves for a chat."""
    done = client.completions.create(
        model=NAME, prompt=[7], temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.usage.completion_tokens == 16
    done = client.chat.completions.create(
        model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.usage.completion_tokens == spec.options.max_len - len(CHAT_IDS)
    assert done.choices[0].finish_reason == "length"


def test_end_of_sequence(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """Forced by a bias: `stop`; with ignore_eos, or fewer than min_tokens, it goes on."""
    forced = {"logit_bias": {"1": 100}, "max_tokens": 6}
    done = complete(client, [7], **forced)
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("stop", 1)
    done = complete(client, [7], **forced, extra_body={"ignore_eos": True})
    assert (done.choices[0].finish_reason, done.choices[0].text) == ("length", words([1] * 6))
    done = complete(client, [7], **forced, extra_body={"min_tokens": 3})
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("stop", 4)


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    fields = dict(
        temperature=1.3,
        top_p=0.9,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"9": 3.5},
    )
    extra = dict(top_k=40, min_p=0.01, repetition_penalty=1.2, min_tokens=2)
    params: dict[str, Any] = {**fields, **extra, "logit_bias": {9: 3.5}}
    expected = offline(spec, [7, 8], **params)
    done = complete(client, [7, 8], **fields, extra_body=extra)
    assert done.choices[0].text == words(expected)
    seeds = [offline(spec, [7, 8], **{**params, "seed": seed}) for seed in (5, 6, 7)]
    done = complete(client, [7, 8], n=3, **fields, extra_body=extra)
    assert [choice.text for choice in done.choices] == [words(ids) for ids in seeds]
    assert len({choice.text for choice in done.choices}) > 1, "seeds are n apart"
    # OpenAI's default is temperature 1, vLLM's top_k -1 is ours 0; without a seed texts differ.
    expected = offline(spec, [7, 8], temperature=1.0, seed=3)
    done = client.completions.create(
        model=NAME, prompt=[7, 8], max_tokens=12, seed=3, extra_body={"top_k": -1}
    )
    assert done.choices[0].text == words(expected)
    done = complete(client, [7, 8], n=4, temperature=2)
    assert len({choice.text for choice in done.choices}) > 1


def test_stop_strings_count_the_same_for_any_steps(
    client: openai.OpenAI, server: Running, spec: mtpc.SpecModel
) -> None:
    """The text ends before the string; tokens behind it are not counted, though drafts were."""
    ids = offline(spec, [7, 8], 30, ignore_eos=True)
    text = words(ids)
    extra = {"ignore_eos": True}
    stopped = 0
    for position in range(2, 12):
        stop = f" w{ids[position]}"
        cut = text.index(stop)
        done = complete(client, [7, 8], max_tokens=30, stop=[stop, "never"], extra_body=extra)
        choice = done.choices[0]
        assert (choice.text, choice.finish_reason) == (text[:cut], "stop")
        # Complete with the word it names, or with the first longer one that begins so.
        used = next(n for n in range(1, 31) if stop in words(ids[:n]))
        assert done.usage.completion_tokens == used
        stream = complete(
            client, [7, 8], max_tokens=30, stop=stop, stream=True,
            stream_options={"include_usage": True}, extra_body=extra,
        )  # fmt: skip
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:cut]
        assert last.usage.completion_tokens == used
        stopped += 1
    assert stopped == 10
    until(lambda: is_idle(server, spec))
    before = spec.stats.finished["stop"]
    complete(client, [7, 8], max_tokens=30, stop=f"w{ids[3]}", extra_body=extra)
    until(lambda: is_idle(server, spec))
    assert spec.stats.finished["stop"] == before + 1, "a stop string is no abort"


def test_logprobs(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """The emitted token and as many of the most probable ones; both shapes."""
    done = complete(client, [7, 8], logprobs=3, max_tokens=6)
    said = done.choices[0].logprobs
    expected = offline(spec, [7, 8], 6)
    assert said.tokens == [word(i) for i in expected]
    assert len(said.token_logprobs) == len(expected)
    for token, logprob, top in zip(
        said.tokens, said.token_logprobs, said.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == pytest.approx(logprob)
        assert logprob == pytest.approx(max(top.values())), "greedy: the most probable one"
    assert said.text_offset[:2] == [0, len(said.tokens[0])]
    assert complete(client, [7, 8], max_tokens=2).choices[0].logprobs is None
    only = complete(client, [7, 8], logprobs=0, max_tokens=2).choices[0].logprobs
    assert [list(top) for top in only.top_logprobs] == [[token] for token in only.tokens]
    content = chat(client, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert [entry.token for entry in content] == [word(i) for i in offline(spec, CHAT_IDS, 4)]
    for entry in content:
        assert bytes(entry.bytes) == entry.token.encode()
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    content = chat(client, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[], []]


# ------------------------------------------------------------------------------------ chat


def test_chat(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    done = chat(client)
    expected = offline(spec, CHAT_IDS)
    assert done.choices[0].message.content == words(expected)
    assert done.choices[0].message.role == "assistant"
    assert done.object == "chat.completion"
    assert done.usage.prompt_tokens == len(CHAT_IDS)
    parts = [{"type": "text", "text": text} for text in ("w3", "w4")]
    turns = [{"role": "system", "content": parts}, {"role": "user", "content": "w7"}]
    done = chat(client, messages=turns, max_completion_tokens=5, max_tokens=openai.omit)
    assert done.choices[0].message.content == words(offline(spec, [5, 11, 3, 4, 12, 7, 91], 5))
    done = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert done.choices[0].message.content == words(offline(spec, [*CHAT_IDS[:-1], 90]))


def test_chat_stream(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """First who speaks, then what; several texts at once, each its own; usage at the end."""
    expected = [offline(spec, CHAT_IDS, temperature=1.0, seed=seed) for seed in (4, 5, 6)]
    fields = dict(temperature=1.0, seed=4, n=3, stream=True)
    chunks = list(chat(client, **fields, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], sum(map(len, expected)))
    texts, roles, reasons = [""] * 3, [0] * 3, [None] * 3
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason
    assert texts == [words(ids) for ids in expected]
    assert roles == [1, 1, 1]
    assert all(reason in ("stop", "length") for reason in reasons)
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_with_logprobs(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    tokens, offsets = [], []
    for chunk in complete(client, [7, 8], stream=True, logprobs=1):
        said = chunk.choices[0].logprobs
        tokens += said.tokens
        offsets += said.text_offset
    assert tokens == [word(i) for i in offline(spec, [7, 8])]
    assert offsets == [sum(map(len, tokens[:n])) for n in range(len(tokens))]


def test_leaving_a_stream_aborts_it(
    client: openai.OpenAI, server: Running, spec: mtpc.SpecModel
) -> None:
    aborted = spec.stats.finished["aborted"]
    with complete(
        client, [7], n=8, stream=True, max_tokens=60, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    until(lambda: is_idle(server, spec))
    # Those that decode at once may be done before a late client is gone; others wait for them.
    assert spec.stats.finished["aborted"] >= aborted + 4


def test_async_client(server: Running, spec: mtpc.SpecModel) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(first: int) -> str:
                stream = await client.chat.completions.create(
                    model=NAME,
                    messages=[{"role": "user", "content": f"w{first}"}],
                    temperature=0,
                    max_tokens=10,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content async for chunk in stream])

            return await asyncio.gather(*(one(first) for first in range(20, 32)))

    expected = [words(offline(spec, [5, 11, first, 91], 10)) for first in range(20, 32)]
    assert asyncio.run(main()) == expected


def test_long_work_is_done_beside_the_loop(
    client: openai.OpenAI, spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations, tokenising of long bodies, and the JSON of whole answers."""
    where: dict[str, str] = {}

    def note(place: type, name: str) -> None:
        real = getattr(place, name)

        def noted(self: Any, *given: Any) -> Any:
            where[name] = threading.current_thread().name
            return real(self, *given)

        monkeypatch.setattr(place, name, noted)

    def beside() -> set[str]:
        return {name for name, thread in where.items() if thread != "server-under-test"}

    for place, name in ((ChatTemplate, "render"), (ServedModel, "encode"), (Answer, "whole")):
        note(place, name)
    done = chat(client, messages=[{"role": "user", "content": "w7 w8"}])
    assert done.choices[0].message.content == words(offline(spec, CHAT_IDS))
    assert beside() == where.keys() == {"whole", "render", "encode"}
    for padding, expected in ((0, {"whole"}), (5000, {"whole", "encode"})):
        where.clear()
        complete(client, " " * padding + "w7 w8")
        assert where.keys() == {"whole", "encode"}
        assert beside() == expected


def test_metrics(client: openai.OpenAI, server: Running, spec: mtpc.SpecModel) -> None:
    """Prometheus' own parser reads it; what was served is in it."""

    def samples() -> dict[str, float]:
        answer = httpx.get(f"{server.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            sample.name + "".join(f",{v}" for v in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    before = samples()
    done = complete(client, [7, 8, 9], extra_body={"ignore_eos": True})
    after = samples()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["mtpc:generation_tokens_total"] == done.usage.completion_tokens == 12
    assert grown["mtpc:request_success_total,length"] == 1
    assert grown["mtpc:http_responses_total,/v1/completions,200"] == 1
    assert grown["mtpc:time_to_first_token_seconds_count"] == 1
    assert grown["mtpc:time_to_first_token_seconds_bucket,+Inf"] == 1
    assert grown["mtpc:e2e_request_latency_seconds_count"] == 1
    assert grown["mtpc:e2e_request_latency_seconds_sum"] > 0
    assert after["mtpc:num_requests_running"] == after["mtpc:server_choices_in_flight"] == 0
    assert after["mtpc:server_ready"] == 1


def test_examples_in_the_docs(
    server: Running, spec: mtpc.SpecModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/server.md's examples run as they stand there, on this server's address and model."""
    page = (ROOT / "docs" / "server.md").read_text()
    page = page.replace("http://127.0.0.1:8000", server.url).replace('"demo"', f'"{NAME}"')
    (example,) = re.findall(r"```python\n(import openai\n.*?)```", page, re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out == spec.generate("The with statement", 16)
    (body,) = re.findall(r"-d '(.*?)'", page)
    (url,) = re.findall(r"curl (\S+)", page)
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"] == spec.generate("The with statement", 16)
