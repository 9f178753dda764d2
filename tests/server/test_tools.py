"""Tools, JSON formats and reasoning, by OpenAI's own client: the same at K = 0 and at K = 3."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from helpers.char_model import char_checkpoint
from helpers.families import TINY
from helpers.served import is_idle, serving, until

import mtpc
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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Running]]:
    """K -> a server of the same checkpoint."""
    directory = char_checkpoint(tmp_path_factory.mktemp("chars"))
    options: dict[str, Any] = {**TINY, "max_len": 480, "batch_buckets": (2,)}
    options |= {"backend": "eager", "dtype": "float64", "sampling": True, "token_mask": True}
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
