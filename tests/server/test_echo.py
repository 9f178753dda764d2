"""`echo`: the prompt comes back, with the log-probabilities that it has for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from helpers.families import TINY
from helpers.openai_client import NAME, client, complete
from helpers.served import is_idle, serving, until
from helpers.word_model import word_checkpoint, words

import mtpc
from mtpc.server.run import Running

__all__ = ["client"]
IDS = [7, 8, 9, 40, 1, 12]


@pytest.fixture(scope="module")
def spec(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> mtpc.SpecModel:
    """As `mtpc serve` compiles it: with masks."""
    directory = word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("echo"))
    options = dict(spec_tokens=1, backend="eager", dtype="float64", batch_buckets=(4,))
    return mtpc.compile(directory, **options, **{**TINY, "sampling": True})


@pytest.fixture(scope="module")
def server(spec: mtpc.SpecModel) -> Iterator[Running]:
    with serving(spec, model_name=NAME) as running:
        yield running
        until(lambda: is_idle(running, spec))


def test_the_prompt_comes_first(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """Text as it was sent, ids as their text; one of several prompts, each with its own."""
    done = complete(client, ["w7  w8", "w9"], echo=True, max_tokens=3)
    new = [words(spec.generate(ids, 3)) for ids in ([0, 7, 8], [0, 9])]
    assert [c.text for c in done.choices] == [f"w7  w8{new[0]}", f"w9{new[1]}"]
    assert done.usage.prompt_tokens == 5
    alone = complete(client, IDS, echo=True, max_tokens=3).choices[0].text
    assert alone == words(IDS) + words(spec.generate(IDS, 3))


def test_the_prompt_has_logprobs(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """As the harness asks: one new token, which is not the prompt's; a null comes first."""
    done = complete(client, IDS, echo=True, max_tokens=1, logprobs=1)
    (expected,) = spec.prompt_logprobs([IDS])
    (new,) = spec.generate(IDS, 1, logprobs=1).logprobs
    found = done.choices[0].logprobs
    assert found.tokens == [spec.served.decode([i]) for i in [*IDS, new.token_id]]
    assert found.token_logprobs == [None, *(e.logprob for e in expected), new.logprob]
    assert found.top_logprobs[0] is None
    for entry, top in zip(expected, found.top_logprobs[1:], strict=False):
        assert max(top.values()) == entry.top[0][1]
        assert entry.logprob in top.values()
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 1


def test_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    """max_tokens 0; a prompt of one token has nothing to score; a stream says the same."""
    for ids in (IDS, [7]):
        done = complete(client, ids, echo=True, max_tokens=0, logprobs=0)
        assert done.choices[0].text == words(ids)
        assert len(done.choices[0].logprobs.token_logprobs) == len(ids)
        assert done.choices[0].finish_reason == "length"
        assert done.usage.completion_tokens == 0
    chunks = list(complete(client, IDS, echo=True, max_tokens=2, logprobs=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks).startswith(words(IDS))
    numbers = [n for c in chunks if c.choices[0].logprobs for n in c.choices[0].logprobs.tokens]
    assert len(numbers) == len(IDS) + 2


def test_a_stop_string_of_the_prompt_stops_nothing(
    client: openai.OpenAI, spec: mtpc.SpecModel
) -> None:
    done = complete(client, IDS, echo=True, max_tokens=1, logprobs=0, stop=[words(IDS[:2])])
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 1


def test_no_tokens_without_echo(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 0; expected .*, or 0 with ec"):
        complete(client, IDS, max_tokens=0)
