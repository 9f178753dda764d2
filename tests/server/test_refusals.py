"""What `mtpc serve` refuses of a request's fields, by name, and what it takes and ignores."""

from __future__ import annotations

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
from helpers.served import serving
from helpers.word_model import words

import mtpc
from mtpc.server.chat import ChatTemplate
from mtpc.server.conversation import Conversations
from mtpc.server.errors import ApiError
from mtpc.server.fields import check_fields
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
        ({"logprobs": 21}, "logprobs", "compiled for at most 20"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 strings"),
        ({"logit_bias": {"w7": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"96": 1}}, "logit_bias", "expected ids in 0..95"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "include_usage alone"),
        ({"extra_body": {"stop_token_ids": [7.5]}}, "stop_token_ids", ""),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens", "expected true"),
        ({"extra_body": {"priority": "high"}}, "priority", "an integer"),
        ({"stop": ["x" * 1025]}, "stop", "at most 1024 characters"),
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
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"extra_body": {"echo": True}}, "echo", "expected false"),
        ({"extra_body": {"add_generation_prompt": False}}, "add_generation_prompt", "true"),
        (
            {"messages": [{"role": "user", "content": "w7", "prefix": True}]},
            "messages[0].prefix",
            "only role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "w7", "x": 1}]}]},
            "messages[0].content[0].x",
            "only type, text",
        ),
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


NOTHING: tuple[dict[str, Any], ...] = (
    {"skip_special_tokens": True},
    {"spaces_between_special_tokens": False},
    {"stop_token_ids": []},
    {"stop_token_ids": None},
    {"bad_words": []},
    {"stop": []},
    {"logit_bias": {}},
    {"use_beam_search": False, "length_penalty": 1.5},
    {"priority": 0},
    {"priority": -3},
    {"request_id": "x"},
    {"logprobs": False},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": False, "include_obfuscation": True}},
    {"service_tier": "flex"},
    {"include_stop_str_in_output": False},
    {"return_token_ids": False},
    {"return_tokens_as_token_ids": False},
    {"structured_outputs": {}},
    {"nobody_knows_this": None},
    {"nobody_knows_this": []},
    {"nobody_knows_this": {}},
)
"""Fields that change no answer, of both endpoints."""
NOTHING_TO_CHATS: tuple[dict[str, Any], ...] = (
    {"echo": False},
    {"add_generation_prompt": True, "continue_final_message": False},
    {"add_special_tokens": False},
    {"logprobs": False, "top_logprobs": 0},
    {"top_logprobs": 0},
    {"tool_choice": "auto"},
    {"functions": [], "function_call": "auto"},
    {"reasoning_effort": "low"},
    {"include_reasoning": True},
    {"verbosity": "low"},
    {"prediction": {"type": "content", "content": "w7"}},
    {"audio": None, "web_search_options": None, "documents": None},
)


@pytest.mark.parametrize("fields", [*NOTHING, *NOTHING_TO_CHATS], ids=str)
def test_fields_that_ask_for_nothing(
    server: Running, spec: mtpc.SpecModel, fields: dict[str, Any]
) -> None:
    """The answer is what it is without them."""
    common = {"model": NAME, "temperature": 0, "max_tokens": 12, **fields}
    talk = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": CHAT, **common})
    assert talk.status_code == 200, talk.text
    assert talk.json()["choices"][0]["message"]["content"] == words(offline(spec, CHAT_IDS))
    if fields in NOTHING:
        text = httpx.post(f"{server.url}/v1/completions", json={"prompt": [7], **common})
        assert text.status_code == 200, text.text
        assert text.json()["choices"][0]["text"] == words(offline(spec, [7]))


TEXT = {"type": "text", "text": "w7 w8"}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "w7 w8", "annotations": []},
        {"content": "w7 w8", "annotations": [{"type": "url_citation", "url": "x"}]},
        {"content": "w7 w8", "refusal": None, "audio": None, "function_call": None},
        {"content": "w7 w8", "tool_calls": []},
        {"content": "w7 w8", "tool_calls": None},
        {"content": "w7 w8", "reasoning": "w9", "reasoning_details": [{"text": "w9"}]},
        {"content": "w7 w8", "reasoning_content": "w9", "reasoning": "w9"},
        {"content": "w7 w8", "cache_control": {"type": "ephemeral"}},
        {
            "content": "w7 w8",
            "id": "msg_1",
            "parsed": {"a": 1},
            "provider_specific_fields": {"a": 1},
        },
        {"content": "w7 w8", "prefix": None},
        {"content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]},
        {"content": [{**TEXT, "annotations": [], "id": "x"}]},
        {"content": [{"type": "refusal", "refusal": "w7 w8"}]},
        {"content": None, "refusal": "w7 w8"},
        {"refusal": "w7 w8"},
    ],
    ids=str,
)
def test_entries_of_messages_that_ask_for_nothing(
    server: Running, spec: mtpc.SpecModel, message: dict[str, Any]
) -> None:
    """As OpenAI, vLLM and proxies return them, and clients send them back."""
    fields = {"model": NAME, "temperature": 0, "max_tokens": 12}
    fields["messages"] = [{"role": "assistant", **message}]
    talk = httpx.post(f"{server.url}/v1/chat/completions", json=fields)
    assert talk.status_code == 200, talk.text
    assert talk.json()["choices"][0]["message"]["content"] == words(offline(spec, CHAT_IDS))


def test_an_assistant_without_text(server: Running) -> None:
    """OpenAI returns null as the content of an empty answer; a user says something."""
    for role, status in (("assistant", 200), ("user", 400)):
        fields: dict[str, Any] = {"model": NAME, "messages": [{"role": role, "content": None}]}
        asked = httpx.post(f"{server.url}/v1/chat/completions", json={**fields, "max_tokens": 1})
        assert asked.status_code == status, asked.text


def test_reasoning_of_history_and_hints_reach_the_template(spec: mtpc.SpecModel) -> None:
    """`reasoning` by the template's name, and `cache_control` of tools not at all."""
    tool = {**TOOL, "cache_control": {"type": "ephemeral"}}
    message = {"role": "assistant", "content": "a", "reasoning": "b"}
    body = {"model": NAME, "messages": [message], "tools": [tool], "reasoning_effort": "none"}
    fields, _ = check_fields("chat", body)
    wanted = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert fields["messages"] == [wanted]
    assert fields["tools"] == [TOOL]
    template = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }}", {})
    made = Conversations(template, spec.served, "none", "none").make(
        {"messages": [wanted], "reasoning_effort": "none"}
    )
    assert made.prompt == "none False"


def test_ignored_fields_are_logged_once(
    spec: mtpc.SpecModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mtpc.server")
    said = "requests have fields that change no answer here: messages[].annotations, store"
    message = {"role": "assistant", "content": "w7", "annotations": [1]}
    fields = {"model": NAME, "max_tokens": 1, "messages": [message], "store": True}
    with serving(spec, model_name=NAME) as running:
        for _ in range(3):
            httpx.post(f"{running.url}/v1/chat/completions", json=fields)
    assert [r.getMessage() for r in caplog.records if "no answer" in r.message] == [said]


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
