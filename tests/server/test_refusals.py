"""What `mtpc serve` refuses of a request's fields, by name, and what it takes and ignores."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from helpers.openai_client import (
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
from helpers.word_model import words

import mtpc
from mtpc.server.errors import ApiError
from mtpc.server.grammars import Grammars
from mtpc.server.run import Running

__all__ = ["client", "nothing_is_left", "server", "spec"]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": [[]]}, "prompt", "text or a list of token ids"),
        ({"prompt": [7, "w8"]}, "prompt", "text or a list of token ids"),
        ({"prompt": [7, 2.5]}, "prompt", "text or a list"),
        ({"prompt": [7, 96]}, None, "prompt id 96; expected ids in 0..95"),
        ({"prompt": [7] * 60}, None, "max_len is 64"),
        ({"max_tokens": 0}, "max_tokens", "an integer in 1.."),
        ({"max_tokens": "8"}, "max_tokens", 'max_tokens is "8"; expected an integer'),
        ({"max_tokens": True}, "max_tokens", "expected an integer"),
        ({"n": 129}, "n", "an integer in 1..128"),
        ({"temperature": -1}, "temperature", "expected a number in [0, 1000]"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"top_p": 0}, "top_p", "expected a number in (0, 1]"),
        ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"seed": 2**63}, "seed", "an integer in"),
        ({"logprobs": 9}, "logprobs", "compiled for at most 5"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 strings"),
        ({"logit_bias": {"w7": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"96": 1}}, "logit_bias", "expected ids in 0..95"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "include_usage alone"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"echo": True, "logprobs": 1}, "echo", "needs token masks, which this model"),
        ({"best_of": 2}, "best_of", "expected 1"),
        ({"suffix": "w3"}, "suffix", "more is not supported"),
        ({"user": 7}, "user", "a string"),
        ({"extra_body": {"top_q": 1}}, "top_q", "not supported; did you mean 'top_p'"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens", "above max_tokens"),
    ],
)  # fmt: skip
def test_refused_completions(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **{"prompt": [7], **fields})
    assert message in refused.value.body["message"]
    assert refused.value.body["param"] == param
    assert refused.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "not empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a string"),
        ({"messages": [{"content": "w7"}]}, "messages[0].role", "a string"),
        ({"messages": [{"role": "tool", "content": "w7"}]}, None, "no tools here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
            "a part",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
            "expected an object",
        ),
        ({"messages": [{"role": "user", "content": "w7", "x": 1}]}, "messages[0].x", "only role"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "expected an object"),
        ({"tools": [TOOL]}, "tools", "knows no format of tool calls"),
        ({"response_format": {"type": "json_object"}}, "response_format", "needs token masks"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"extra_body": {"prompt": "w7"}}, "prompt", "not supported"),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs",
            "has messages; expected other variables",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"add_generation_prompt": False}}},
            "chat_template_kwargs",
            "has add_generation_prompt",
        ),
    ],
)
def test_refused_chats(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert message in refused.value.body["message"]
    assert refused.value.body["param"] == param


def test_accepted_and_idle(client: openai.OpenAI, spec: mtpc.SpecModel) -> None:
    """Fields that change nothing, at the values that ask for nothing; null everywhere."""
    idle = dict(user="me", best_of=1, echo=False, suffix="", logprobs=None, stop=None, seed=None)
    assert complete(client, [7], **idle).choices[0].text == words(offline(spec, [7]))
    done = chat(
        client, user="me", metadata={"a": "b"}, store=False, tools=[], tool_choice="none",
        response_format={"type": "text"}, modalities=["text"], service_tier="auto",
        parallel_tool_calls=True, safety_identifier="x", prompt_cache_key="y",
    )  # fmt: skip
    assert done.choices[0].message.content == words(offline(spec, CHAT_IDS))


def test_unknown_model_and_paths(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="w7")
    assert missing.value.body["code"] == "model_not_found"
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model=NAME, input="w7")
    assert "/v1/embeddings" in missing.value.body["message"]
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "does not take GET" in wrong.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_tokenizer_that_grammars_cannot_use(word_spec: mtpc.SpecModel) -> None:
    """Here one of words: a clear answer, not a failure of the server."""
    with pytest.raises(ApiError, match="does not read this model's tokenizer") as refused:
        Grammars(word_spec.served).matchers('start: "a"', 1, "response_format")
    assert (refused.value.status, refused.value.param) == (400, "response_format")
