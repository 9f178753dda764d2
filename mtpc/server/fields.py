"""The fields of a request, and the checks of their values.

`USED` has the fields of OpenAI and vLLM (marked) that the server uses. `NO_OPS` has fields that
change no answer by OpenAI's own definition; the server accepts and ignores them. `ONE_VALUE` has
fields that the server accepts only with a value that has no effect. The server refuses any other
field by name. A field with the value null counts as absent.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mtpc.sampling_params import MAX_SEED
from mtpc.server.errors import ApiError

MOST_TOKENS = 2**31 - 1
MAX_CHOICES = 128
"""The largest `n`, which is OpenAI's limit."""
_TEXTS = ("role", "name", "tool_call_id", "reasoning_content")
"""Fields of a message with text."""
MAX_STOPS = 16
"""The most stop strings. OpenAI allows 4, vLLM any number."""

_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean",
          type(None): "null"}  # fmt: skip
"""Types of JSON that are no object."""

Check = Callable[[str, Any], Any]
"""Takes a field's name and its value (never None), and returns the value to use."""


def _refuse(name: str, value: Any, wanted: str) -> ApiError:
    try:
        shown = json.dumps(value)
    except RecursionError:
        shown = "nested too deeply"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ApiError(400, f"{name} is {shown}; expected {wanted}", name, "invalid_value")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if not _is_int(value) or not low <= value <= high:
            raise _refuse(name, value, f"an integer in {low}..{high}")
        return value

    return check


def _number(name: str, value: Any) -> float:
    """Check for a number. `SamplingParams` checks its range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refuse(name, value, "a number")
    return value


def _of_type(kind: type, wanted: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _refuse(name, value, wanted)
        return value

    return check


_boolean = _of_type(bool, "true or false")
_string = _of_type(str, "a string")
_object = _of_type(dict, "an object")


def _top_k(name: str, value: Any) -> int:
    """Turn vLLM's -1, which means all tokens, into `SamplingParams`' 0."""
    return max(_integer(-1, 2**31 - 1)(name, value), 0)


def _seed(name: str, value: Any) -> int:
    """OpenAI's seed is a signed 64-bit integer. The server uses 63 bits of it."""
    return _integer(-(2**63), 2**63 - 1)(name, value) & MAX_SEED


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise _refuse(name, value, "a string or several, none of them empty")
    if len(strings) > MAX_STOPS:
        raise _refuse(name, value, f"at most {MAX_STOPS} strings")
    return tuple(strings)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """Turn the keys, which are strings in JSON, into token ids of the model's tokenizer."""
    bias = {}
    for key, number in _object(name, value).items():
        if not key.isdecimal() or len(key) > 9:
            raise _refuse(name, value, f"token ids as keys, found {key[:20]!r}")
        bias[int(key)] = _number(name, number)
    return bias


def _stream_options(name: str, value: Any) -> bool:
    """Whether the stream ends with the usage."""
    for key, flag in _object(name, value).items():
        if key not in ("include_usage", "include_obfuscation"):
            raise _refuse(f"{name}.{key}", flag, "include_usage alone")
        if flag is not None:
            _boolean(f"{name}.{key}", flag)
    if value.get("include_obfuscation"):
        raise _refuse(f"{name}.include_obfuscation", True, "false: this server pads no chunks")
    return bool(value.get("include_usage"))


def _template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """The template's further variables. They must not replace those that the server sets."""
    for key in ("messages", "add_generation_prompt", "tools"):
        if key in _object(name, value):
            message = f"{name} has {key}; expected other variables: the server sets this one"
            raise ApiError(400, message, name, "invalid_value")
    return value


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    """A list of prompts, from a text, several texts, token ids, or several lists of token ids."""
    rows = [value] if isinstance(value, str) or _is_row(value) else value
    if not isinstance(rows, list) or not rows:
        raise _refuse(name, value, "text, token ids, or a list of one of them, not empty")
    for row in rows:
        if not isinstance(row, str) and not _is_row(row):
            raise _refuse(name, row, "text or a list of token ids as each prompt")
    return rows


def _row(name: str, value: Any) -> list[int]:
    if value != [] and not _is_row(value):
        raise _refuse(name, value, "a list of token ids")
    return value


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_int, value))


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """A conversation. The parts of a message's content become one text, joined by newlines.

    vLLM joins them in the same way. If one of the parts is an image, they stay parts.
    """
    if not isinstance(value, list) or not value:
        raise _refuse(name, value, "a list of messages, not empty")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    message = {key: v for key, v in _object(name, value).items() if v is not None}
    for key in message.keys() - {*_TEXTS, "content", "tool_calls"}:
        wanted = f"only {', '.join(_TEXTS)}, content (text alone) and tool_calls"
        raise _refuse(f"{name}.{key}", message[key], wanted)
    for key in _TEXTS:
        if key in message or key == "role":
            _string(f"{name}.{key}", message.get(key))
    content = message.get("content")
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(f"{name}.tool_calls", message["tool_calls"])
        content = "" if content is None else content  # A message with calls alone has no content.
    if isinstance(content, list):
        parts = [_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
        if any(part["type"] == "image_url" for part in parts):
            return {**message, "content": parts}
        content = "\n".join(part["text"] for part in parts)
    return {**message, "content": _string(f"{name}.content", content)}


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """The tool calls of an earlier message of the assistant."""
    if not isinstance(value, list):
        raise _refuse(name, value, "a list of calls")
    for i, call in enumerate(value):
        function = _object(f"{name}[{i}].function", _object(f"{name}[{i}]", call).get("function"))
        for key in ("name", "arguments"):
            _string(f"{name}[{i}].function.{key}", function.get(key))
    return value


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _refuse(name, value, "a list of tools")
    for i, tool in enumerate(value):
        place = f"{name}[{i}]"
        if _object(place, tool).get("type") != "function":
            raise _refuse(f"{place}.type", tool.get("type"), '"function"')
        function = _object(f"{place}.function", tool.get("function"))
        called = _string(f"{place}.function.name", function.get("name"))
        if not re.fullmatch(r"[\w.-]{1,64}", called, re.ASCII):
            raise _refuse(f"{place}.function.name", called, "1 to 64 of a-z, A-Z, 0-9, _, . and -")
        if function.get("parameters") is not None:
            _object(f"{place}.function.parameters", function["parameters"])
    return value


def _tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, dict):
        function = _object(f"{name}.function", value.get("function"))
        _string(f"{name}.function.name", function.get("name"))
        return value
    if value not in ("none", "auto", "required"):
        raise _refuse(name, value, '"none", "auto", "required" or a function')
    return value


def _response_format(name: str, value: Any) -> dict[str, Any]:
    kind = _object(name, value).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _refuse(f"{name}.type", kind, '"text", "json_object" or "json_schema"')
    if kind == "json_schema":
        given = _object(f"{name}.json_schema", value.get("json_schema"))
        _object(f"{name}.json_schema.schema", given.get("schema", {}))
    return value


def _part(name: str, value: Any) -> dict[str, Any]:
    part = _object(name, value)
    kind = part.get("type")
    if kind not in ("text", "image_url") or part.keys() != {"type", kind}:
        raise _refuse(name, value, 'a part {"type": "text", "text": ...}, or of image_url')
    if kind == "text":
        _string(f"{name}.text", part["text"])
        return part
    image = _object(f"{name}.image_url", part["image_url"])
    for key in image.keys() - {"url", "detail"}:
        raise _refuse(f"{name}.image_url.{key}", image[key], "only url and detail")
    if image.get("detail") not in (None, "auto"):
        raise _refuse(f"{name}.image_url.detail", image["detail"], '"auto", or no such field')
    _string(f"{name}.image_url.url", image.get("url"))
    return part


_BOTH: Mapping[str, Check] = {
    "model": _string,
    "max_tokens": _integer(1, MOST_TOKENS),
    "n": _integer(1, MAX_CHOICES),
    "stop": _stop,
    "stream": _boolean,
    "stream_options": _stream_options,
    "temperature": _number,
    "top_p": _number,
    "seed": _seed,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _logit_bias,
    # vLLM's.
    "top_k": _top_k,
    "min_p": _number,
    "repetition_penalty": _number,
    "min_tokens": _integer(0, 2**31 - 1),
    "ignore_eos": _boolean,
    "stop_token_ids": _row,
}
USED: Mapping[str, Mapping[str, Check]] = {
    "completions": {
        **_BOTH,
        "prompt": _prompts,
        "logprobs": _integer(0, 64),
        "echo": _boolean,
        "max_tokens": _integer(0, MOST_TOKENS),
    },
    "chat": {
        **_BOTH,
        "messages": _messages,
        "max_completion_tokens": _integer(1, MOST_TOKENS),
        "logprobs": _boolean,
        "top_logprobs": _integer(0, 64),
        "chat_template_kwargs": _template_kwargs,  # vLLM's.
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": _boolean,
        "response_format": _response_format,
    },
    # vLLM's endpoints.
    "tokenize": {
        "model": _string,
        "prompt": _string,
        "messages": _messages,
        "tools": _tools,
        "chat_template_kwargs": _template_kwargs,
        "add_special_tokens": _boolean,
        "return_token_strs": _boolean,
    },
    "detokenize": {"model": _string, "tokens": _row},
}
NO_OPS: Mapping[str, Mapping[str, Check]] = {
    "completions": {"user": _string},
    "chat": {
        "user": _string,
        "safety_identifier": _string,
        "prompt_cache_key": _string,
        "metadata": _object,
        "store": _boolean,
    },
}
ONE_VALUE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "completions": {"best_of": (1,), "suffix": ("",)},
    "chat": {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
    },
}


REQUIRED: Mapping[str, tuple[str, ...]] = {
    "completions": ("model", "prompt"),
    "chat": ("model", "messages"),
    "tokenize": (),
    "detokenize": ("tokens",),
}
"""Fields that every request has; `tokenize` needs a prompt or messages."""


def check_fields(endpoint: str, body: Any) -> dict[str, Any]:
    """Check a request's fields, and return those that the server uses.

    `SamplingParams` checks the ranges of sampling parameters later.

    Args:
        endpoint: a key of `REQUIRED`.
        body: the parsed JSON.

    Raises:
        ApiError: 400, with the field's name.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {_NAMES[type(body)]}; expected an object")
    used, idle = USED[endpoint], NO_OPS.get(endpoint, {})
    fixed = ONE_VALUE.get(endpoint, {})
    checked = {}
    for name, value in body.items():
        if name not in used and name not in idle and name not in fixed:
            raise _unknown(name, [*used, *idle, *fixed])
        if value is None:
            continue
        if name in used:
            checked[name] = used[name](name, value)
        elif name in idle:
            idle[name](name, value)
        elif not any(value == v and type(value) is type(v) for v in fixed[name]):
            allowed = " or ".join(json.dumps(v) for v in fixed[name])
            raise _refuse(name, value, f"{allowed}, or no such field: more is not supported")
    for name in REQUIRED[endpoint]:
        if name not in checked:
            raise ApiError(400, f"{name} is missing; every request needs it", name, "missing")
    _check_tools(checked)
    if checked.get("max_tokens") == 0 and not checked.get("echo"):
        raise _refuse("max_tokens", 0, f"an integer in 1..{MOST_TOKENS}, or 0 with echo: true")
    if "stream_options" in checked and not checked.get("stream"):
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return checked


def _check_tools(fields: Mapping[str, Any]) -> None:
    """Check that tools have different names, and that `tool_choice` names one of them."""
    names = [tool["function"]["name"] for tool in fields.get("tools", ())]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools has {twice!r} twice; expected one of each", "tools")
    choice = fields.get("tool_choice", "none")
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    if wanted is not None and wanted not in names:
        known = ", ".join(names) or "none"
        message = f"tool_choice names {wanted!r}; expected one of the tools: {known}"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    if choice in ("auto", "required") and not names:
        raise ApiError(400, f"tool_choice {choice!r} needs tools", "tool_choice")


def _unknown(name: str, known: list[str]) -> ApiError:
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "docs/server.md lists the supported fields"
    message = f"the field {name[:100]!r} is not supported; {hint}"
    return ApiError(400, message, name[:100], "unknown_field")
