"""Tools, JSON formats and reasoning, by OpenAI's own client: the same at K = 0 and at K = 3."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers.char_model import char_checkpoint
from helpers.families import TINY
from helpers.served import is_idle, serving, until

import mtpc
from mtpc.errors import GrammarError
from mtpc.server.errors import ApiError, api_error
from mtpc.server.run import Running

pytest.importorskip("llguidance")
NAME = "chars"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {
            "type": "array",
            "items": AGE,
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
AS_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, cpu_cache: Path
) -> Iterator[dict[int, Running]]:
    """K -> a server of the same checkpoint."""
    directory = char_checkpoint(tmp_path_factory.mktemp("chars"))
    options: dict[str, Any] = {**TINY, "max_len": 480, "batch_buckets": (2,)}
    options |= {"backend": "cpu", "dtype": "float64", "sampling": True, "token_mask": True}
    options["cache_dir"] = cpu_cache  # It has the kernels.
    with ExitStack() as stack:
        made = {}
        for k in (0, 3):
            spec = mtpc.compile(directory, spec_tokens=k, **options)
            made[k] = stack.enter_context(serving(spec, model_name=NAME))
            stack.callback(until, lambda k=k, spec=spec: is_idle(made[k], spec))
        yield made


@pytest.fixture(scope="module")
def ask(servers: dict[int, Running]) -> Iterator[Callable[..., Any]]:
    """ask(k, **fields): a chat at a server, by the client."""
    with ExitStack() as stack:
        clients = {
            k: stack.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            )
            for k, server in servers.items()
        }

        def call(k: int, lead: str = "", **fields: Any) -> Any:
            variables = {"lead": lead, "enable_thinking": False, **fields.pop("vars", {})}
            body: dict[str, Any] = {"chat_template_kwargs": variables}
            if "structured_outputs" in fields:
                body["structured_outputs"] = fields.pop("structured_outputs")
            messages: Any = [{"role": "user", "content": "hi"}]
            fields = {"messages": messages, "temperature": 0, "max_tokens": 120, **fields}
            return clients[k].chat.completions.create(model=NAME, extra_body=body, **fields)

        yield call


def joined(stream: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and finish reason of a stream."""
    content, reasoning, reason = "", "", ""
    calls: list[list[str]] = []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, reasoning, [(name, text) for name, text in calls], reason


def of(answer: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The same of a whole answer."""
    (choice,) = answer.choices
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", reasoning, calls, choice.finish_reason


def same(ask: Callable[..., Any], **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The answer, which is the same at each K, streamed or not."""
    found = [of(ask(k, **fields)) for k in (0, 3)]
    found += [joined(ask(k, stream=True, **fields)) for k in (0, 3)]
    assert [one == found[0] for one in found] == [True] * 4, found
    return found[0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_by_a_schema(ask: Callable[..., Any], temperature: float) -> None:
    for seed in range(1 if temperature == 0 else 2):
        content, _, _, reason = same(
            ask, response_format=AS_SCHEMA, temperature=temperature, seed=seed
        )
        value = json.loads(content)
        assert reason == "stop"
        assert list(value) == ["name", "kind", "ages"]
        assert value["kind"] in ("cat", "dog")
        assert [type(age) for age in value["ages"]] == [int, int]


def test_json_of_any_kind(ask: Callable[..., Any]) -> None:
    content, *_ = same(ask, response_format={"type": "json_object"}, temperature=1, seed=3)
    assert content.startswith("{")


def test_a_required_tool(ask: Callable[..., Any]) -> None:
    for seed in range(2):
        content, _, calls, reason = same(
            ask, tools=[WEATHER, STOP], tool_choice="required", parallel_tool_calls=False,
            temperature=1, seed=seed,
        )  # fmt: skip
        ((name, arguments),) = calls
        assert (content, reason) == ("", "tool_calls")
        assert name in ("get_weather", "stop")
        if name == "get_weather":
            assert json.loads(arguments).keys() == {"city", "days"}


def test_a_named_tool(ask: Callable[..., Any]) -> None:
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    _, _, calls, _ = same(ask, tools=[STOP, WEATHER], tool_choice=chosen)
    assert [name for name, _ in calls] == ["get_weather"]
    assert json.loads(calls[0][1])["city"] in ("Rome", "Oslo")


def test_a_forced_tool_that_is_cut(ask: Callable[..., Any]) -> None:
    """By `max_tokens` or a stop string, anywhere: no mark of a call in the content."""
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = same(ask, tools=[WEATHER, STOP], tool_choice=chosen)[2]
    seen = set()
    for cut in ({"max_tokens": 1}, {"max_tokens": 12}, {"max_tokens": 46}, {"stop": "arg"}):
        for choice in (chosen, "required"):
            given: Any = {"tools": [WEATHER, STOP], "tool_choice": choice, **cut}
            content, _, calls, _ = same(ask, **given)
            assert content == ""
            assert [name for name, _ in calls] in ([], ["get_weather"], ["stop"])
            if choice == chosen:
                assert all(whole[0][1].startswith(text) for _, text in calls)
                seen.add(len(calls))
    assert seen == {0, 1}


def test_reasoning_comes_before_what_a_grammar_says(ask: Callable[..., Any]) -> None:
    """The section is free; JSON and calls begin after its end."""
    thinking: Any = {"vars": {"enable_thinking": True}, "logit_bias": {"5": 4.0}, "temperature": 1}
    content, reasoning, _, _ = same(ask, response_format=AS_SCHEMA, seed=5, **thinking)
    assert reasoning
    assert json.loads(content)["kind"] in ("cat", "dog")
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    content, reasoning, calls, _ = same(
        ask, tools=[WEATHER], tool_choice=chosen, seed=5, **thinking
    )
    assert (content, [name for name, _ in calls]) == ("", ["get_weather"])
    assert reasoning


def test_a_model_that_stays_in_its_reasoning(ask: Callable[..., Any]) -> None:
    content, reasoning, _, reason = same(
        ask, vars={"enable_thinking": True}, logit_bias={"5": -100}, max_tokens=9
    )
    assert (content, reason) == ("", "length")
    assert reasoning


def test_earlier_calls_and_answers_of_tools(ask: Callable[..., Any]) -> None:
    """They reach the template, arguments as an object."""
    messages: Any = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    answer = ask(3, messages=messages, tools=[WEATHER], max_tokens=1)
    plain = ask(3, messages=messages[:1], tools=[WEATHER], max_tokens=1)
    assistant = 'assistant: \n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'
    marks = len("<tool_call>") - 1 + len("</tool_call>") - 1
    more = len(f"{assistant}\n</tool_call>tool: sun\n") - marks
    assert answer.usage.prompt_tokens - plain.usage.prompt_tokens == more


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", 'expected "function"'),
        ({"tools": [WEATHER, WEATHER]}, "tools", "'get_weather' twice"),
        (
            {"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "tool_choice",
            "names 'go'; expected one of the tools: stop",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'expected "text"'),
        (
            {"response_format": {**AS_SCHEMA, "json_schema": {"schema": {"type": "pet"}}}},
            "response_format",
            "cannot be followed: ",
        ),
    ],
)
def test_refusals(ask: Callable[..., Any], fields: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(0, **fields)
    assert error.value.param == param
    assert message in str(error.value)


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


PAIR: dict[str, Any] = {"type": "object", "required": ["x"]}
LINK = {**PAIR, "properties": {"x": {"$ref": "#/$defs/a"}}}
BEYOND: dict[str, Any] = {
    "500 optional properties": optional(500),
    "30000 optional properties": optional(30_000),
    "5000 of anyOf": {
        "anyOf": [
            {"type": "object", "properties": {f"a{i}": {"const": i}}, "required": [f"a{i}"]}
            for i in range(5000)
        ]
    },
    "90000 of enum": {"enum": [f"v{i}" for i in range(90_000)]},
    "a required cycle": {"$ref": "#/$defs/a", "$defs": {"a": LINK}},
    "a reference to itself": {"$ref": "#"},
    "a definition of itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a reference to nothing": {"$ref": "#/nowhere"},
    "a reference to a page": {"$ref": "http://example.org/x"},
    "no value": {"type": "integer", "minimum": 5, "maximum": 3},
    "two types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "a broken pattern": {"type": "string", "pattern": "("},
    "a pattern that looks ahead": {"type": "string", "pattern": "a(?=b)"},
    "another keyword": {"not": {}},
    "a long number": {"type": "integer", "multipleOf": 10**30},
}
"""Schemas beyond what llguidance can do, or beyond its limits."""


@pytest.mark.parametrize("what", BEYOND)
@pytest.mark.parametrize("place", ["tool", "streamed", "structured"])
def test_what_the_library_refuses(
    ask: Callable[..., Any], servers: dict[int, Running], what: str, place: str, caplog: Any
) -> None:
    """400 with its words, and nothing in the log: not a failure of the server."""
    schema, fields = BEYOND[what], dict[str, Any]()
    if place == "tool":
        function = {"name": "f", "parameters": schema}
        fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        fields["vars"] = {"hide_tools": True}
    elif place == "structured":
        fields = {"structured_outputs": {"json": schema}}
    else:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields = {"response_format": wanted, "stream": place == "streamed"}
    with pytest.raises(openai.BadRequestError, match="cannot be followed: ") as refused:
        ask(3, **fields)
    assert refused.value.param == {"tool": "tool_choice", "structured": "structured_outputs"}.get(
        place, "response_format"
    )
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_a_limit_that_only_a_text_reaches() -> None:
    """The engine's error has it as its cause: the client gets the library's words."""
    error = GrammarError("prompt 0: its grammar failed after 3 new tokens")
    error.__cause__ = ApiError(400, "response_format cannot be followed: too complex", "x")
    assert api_error(error) is error.__cause__


STRUCTURED: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["cat", "dog", "a/b"]}, "cat|dog|a/b"),
    "regex": ({"regex": r"[a-c]{2}/\d\/x\\"}, r"[a-c]{2}/\d/x\\"),
    "json": ({"json": {"type": "integer", "minimum": 0, "maximum": 9}}, "[0-9]"),
    "json as text": ({"json": '{"enum": [[1, 2]]}', "disable_any_whitespace": True}, r"\[1, 2\]"),
    "grammar": ({"grammar": 'start: "}" | "x" y\ny: /[0-9]/', "json_object": False}, "}|x[0-9]"),
}


@pytest.mark.parametrize("what", STRUCTURED)
def test_structured_outputs(
    ask: Callable[..., Any], servers: dict[int, Running], what: str
) -> None:
    """vLLM's, in chats and completions, also behind reasoning."""
    wanted, pattern = STRUCTURED[what]
    content, *_ = same(ask, structured_outputs=wanted, temperature=1, seed=4)
    assert re.fullmatch(pattern, content), content
    thinking: Any = {"vars": {"enable_thinking": True}, "logit_bias": {"5": 4.0}}
    content, *_ = same(ask, structured_outputs=wanted, temperature=1, seed=4, **thinking)
    assert re.fullmatch(pattern, content), content
    fields = {"model": NAME, "prompt": ["a", "b"], "n": 2, "seed": 1, "max_tokens": 99}
    done = httpx.post(
        f"{servers[3].url}/v1/completions", json={**fields, "structured_outputs": wanted}
    )
    texts = [choice["text"] for choice in done.json()["choices"]]
    assert [bool(re.fullmatch(pattern, text)) for text in texts] == [True] * 4, texts


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a"], "regex": "b"}, "one of json, json_object"),
        ({"json": "{"}, "a schema in JSON"),
        ({"json": [1]}, "an object"),
        ({"regex": 5}, "a string"),
        ({"regex": "("}, "cannot be followed"),
        ({"grammar": "start: nothing"}, "cannot be followed"),
        ({"structural_tag": "{}"}, "only json, json_object"),
    ],
)
def test_refused_structured_outputs(ask: Callable[..., Any], wanted: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(0, structured_outputs=wanted)
    assert message in refused.value.message
    with pytest.raises(openai.BadRequestError, match="expected one of them"):
        ask(0, structured_outputs={"choice": ["a"]}, response_format={"type": "json_object"})


@pytest.mark.parametrize("is_chat", [False, True])
def test_token_ids_and_stop_strings(servers: dict[int, Running], is_chat: bool) -> None:
    """`return_token_ids` and `include_stop_str_in_output`: the same at each K, streamed or not."""
    path = "chat/completions" if is_chat else "completions"
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 40, "n": 2}
    asked |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    found = []
    for server in servers.values():
        url = f"{server.url}/v1/{path}"
        plain = httpx.post(url, json={**asked, "n": 1}).json()["choices"][0]
        text = plain["message"]["content"] if is_chat else plain["text"]
        stop = text[7:10]
        fields = {**asked, "stop": stop, "include_stop_str_in_output": True}
        whole = httpx.post(url, json={**fields, "return_token_ids": True}).json()
        for choice in whole["choices"]:
            said = choice["message"]["content"] if is_chat else choice["text"]
            assert said == text[: text.index(stop) + 3]
            assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"] / 2
        prompt = (whole if is_chat else whole["choices"][0])["prompt_token_ids"]
        assert len(prompt) == whole["usage"]["prompt_tokens"]
        parts: list[list[int]] = [[], []]
        seen = []
        with httpx.stream(
            "POST", url, json={**fields, "return_token_ids": True, "stream": True}
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    for choice in event["choices"]:
                        parts[choice["index"]] += choice.get("token_ids", [])
                        seen += [(event if is_chat else choice).get("prompt_token_ids")]
        assert parts == [choice["token_ids"] for choice in whole["choices"]]
        assert [ids for ids in seen if ids] == [prompt, prompt]
        assert "token_ids" not in plain
        found.append((parts, prompt))
    assert found[0] == found[1]


def drawn_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema whose every value is short."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const"]
    kind = chance.choice(kinds + ["array", "object", "anyOf"] * bool(depth))
    if kind == "string":
        return {"type": kind, "maxLength": chance.randint(0, 4)}
    if kind == "integer":
        low = chance.randint(-20, 20)
        return {"type": kind, "minimum": low, "maximum": low + chance.randint(0, 99)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind in ("enum", "const"):
        values = ["a b", "", 3, None, True, [1, "x"], {"k": 0}]
        return {kind: chance.sample(values, 3) if kind == "enum" else chance.choice(values)}
    parts = [drawn_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if kind == "anyOf":
        return {kind: parts}
    if kind == "array":
        return {"type": kind, "items": parts[0], "maxItems": len(parts)}
    names = chance.sample(["a", "b c", "d_1", "Zz"], len(parts))
    required = [name for name in names if chance.random() < 0.7]
    properties = dict(zip(names, parts, strict=True))
    return {
        "type": kind, "properties": properties, "required": required, "additionalProperties": False
    }  # fmt: skip


@pytest.mark.slow
def test_many_schemas(ask: Callable[..., Any]) -> None:
    """1,000 schemas, as formats or parameters of tools: the same at K = 0 and 3, and valid."""
    jsonschema = pytest.importorskip("jsonschema")
    chance = random.Random(11)
    for number in range(1000):
        schema = drawn_schema(chance)
        sampled: Any = {"temperature": chance.choice([0, 1]), "seed": number, "max_tokens": 150}
        if chance.random() < 0.5:
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            found = [of(ask(k, response_format=wanted, **sampled)) for k in (0, 3)]
            texts = [found[0][0]]
        else:
            schema = {
                "type": "object", "properties": {"x": schema}, "required": ["x"],
                "additionalProperties": False,
            }  # fmt: skip
            tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
            chosen = {"type": "function", "function": {"name": "f"}}
            forced: Any = {"tools": [tool], "tool_choice": chosen}
            forced["vars"] = {"hide_tools": True}
            found = [joined(ask(k, stream=True, **forced, **sampled)) for k in (0, 3)]
            texts = [arguments for _, arguments in found[0][2]]
        assert found[0] == found[1], schema
        if found[0][3] != "length":
            assert len(texts) == 1
            jsonschema.validate(json.loads(texts[0]), schema)
