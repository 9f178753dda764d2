"""The fields of a request, and the checks of their values.

`USED` has the fields of OpenAI and vLLM (marked) that the server uses. `NO_OPS` has fields that
change no answer by OpenAI's or vLLM's own definition, or are hints: they are ignored. `ONE_VALUE`
has fields that are accepted only with a value that has no effect. Any other field asks for nothing
if it is empty, and else is refused by name. A field with the value null counts as absent.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtpc.sampling_params import MAX_SEED
from mtpc.server.errors import ApiError

MOST_TOKENS = 2**31 - 1
MAX_CHOICES = 128
"""The largest `n`, which is OpenAI's limit."""
_TEXTS = ("role", "name", "tool_call_id", "reasoning_content")
"""Fields of a message with text."""
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""The most stop strings, and characters of each, which a text may have to hold back."""
_IDLE = (
    *("annotations", "cache_control", "id", "parsed", "provider_specific_fields"),
    *("reasoning_details", "refusal", "thinking_blocks"),
)
"""Entries that servers and clients put beside the text of messages, parts and tools. They are no
part of a prompt; only the refusal of a message that has no text is."""

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
    if not isinstance(strings, list) or not all(map(_is_text, strings)):
        raise _refuse(name, value, "a string or several, none of them empty")
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_CHARS:
        wanted = f"at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
        raise _refuse(name, value, wanted)
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
        if key not in ("include_usage", "include_obfuscation") and flag not in (None, False):
            raise _refuse(f"{name}.{key}", flag, "include_usage alone")
        if flag is not None:
            _boolean(f"{name}.{key}", flag)
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


def _used(name: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The entries of an object that have these names. Others may be idle, or empty."""
    found = {}
    for key, entry in _object(name, value).items():
        if key in names:
            if entry is not None:
                found[key] = entry
        elif key not in _IDLE and not _is_empty(entry):
            raise _refuse(f"{name}.{key}", entry, f"only {', '.join(names)}")
    return found


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def _message(name: str, value: Any) -> dict[str, Any]:
    message = _used(name, value, (*_TEXTS, "reasoning", "content", "tool_calls"))
    for key in (*_TEXTS, "reasoning"):
        if key in message or key == "role":
            _string(f"{name}.{key}", message.get(key))
    if "reasoning" in message:  # vLLM's newer name.
        reasoning = message.pop("reasoning")
        message.setdefault("reasoning_content", reasoning)
    content, refusal = message.get("content"), value.get("refusal")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    if content is None and (calls or message["role"] == "assistant"):
        content = refusal if isinstance(refusal, str) else ""
    if isinstance(content, list):
        parts = [_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
        if any(part["type"] == "image_url" for part in parts):
            return {**message, "content": parts}
        content = "\n".join(part["text"] for part in parts)
    return {**message, "content": _string(f"{name}.content", content)}


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
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
    return [{key: entry for key, entry in tool.items() if key not in _IDLE} for tool in value]


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


def _structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """vLLM's: at most one entry, which says what the text must be."""
    hints = ("disable_any_whitespace", "disable_fallback")  # JSON has no whitespace of its own.
    rest = {
        key: v for key, v in _object(name, value).items() if key not in hints and v is not False
    }
    given = _used(name, rest, ("json", "json_object", "regex", "choice", "grammar"))
    if len(given) > 1:
        raise _refuse(name, value, "one of json, json_object, regex, choice and grammar")
    for kind, entry in given.items():
        place = f"{name}.{kind}"
        if kind == "json" and isinstance(entry, str):
            try:
                given[kind] = entry = json.loads(entry)
            except (ValueError, RecursionError) as error:
                raise _refuse(place, entry, f"a schema in JSON: {error}") from None
        if kind == "choice":
            if not isinstance(entry, list) or not entry or not all(map(_is_text, entry)):
                raise _refuse(place, entry, "a list of strings, none of them empty")
        else:
            {"json": _object, "json_object": _boolean}.get(kind, _string)(place, entry)
    return given


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _part(name: str, value: Any) -> dict[str, Any]:
    kind = _object(name, value).get("type")
    if kind not in ("text", "refusal", "image_url"):
        raise _refuse(name, value, 'a part {"type": "text", "text": ...}, or of image_url')
    part = _used(name, value, ("type", kind))
    if kind != "image_url":
        return {"type": "text", "text": _string(f"{name}.{kind}", part.get(kind))}
    image = _used(f"{name}.image_url", part.get(kind), ("url", "detail"))
    if image.get("detail") not in (None, "auto"):
        raise _refuse(f"{name}.image_url.detail", image["detail"], '"auto", or no such field')
    _string(f"{name}.image_url.url", image.get("url"))
    return {"type": kind, "image_url": image}


def _logprobs(name: str, value: Any) -> int | None:
    return None if value is False else _integer(0, 64)(name, value)


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
    "include_stop_str_in_output": _boolean,
    "return_token_ids": _boolean,
    "structured_outputs": _structured_outputs,
    "stop_token_ids": _row,
}
USED: Mapping[str, Mapping[str, Check]] = {
    "completions": {
        **_BOTH,
        "prompt": _prompts,
        "logprobs": _logprobs,
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
        "reasoning_effort": _string,
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
_IDLE_FIELDS: Mapping[str, Check] = {
    "user": _string,
    "safety_identifier": _string,
    "prompt_cache_key": _string,
    "prompt_cache_retention": _string,
    "service_tier": _string,
    "metadata": _object,
    "store": _boolean,
    # vLLM's.
    "priority": _integer(-(2**63), 2**63 - 1),
    "request_id": _string,
    "length_penalty": _number,
    "spaces_between_special_tokens": _boolean,
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
}
NO_OPS: Mapping[str, Mapping[str, Check]] = {
    "completions": _IDLE_FIELDS,
    "chat": {**_IDLE_FIELDS, "verbosity": _string, "prediction": _object},
}
ONE_VALUE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "completions": {**_NEUTRAL, "best_of": (1,), "suffix": ("",), "add_special_tokens": (True,)},
    "chat": {
        **_NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "include_reasoning": (True,),
    },
    "tokenize": {"add_generation_prompt": (True,), "continue_final_message": (False,)},
}


REQUIRED: Mapping[str, tuple[str, ...]] = {
    "completions": ("model", "prompt"),
    "chat": ("model", "messages"),
    "tokenize": (),
    "detokenize": ("tokens",),
}
"""Fields that every request has; `tokenize` needs a prompt or messages."""


def check_fields(endpoint: str, body: Any) -> tuple[dict[str, Any], set[str]]:
    """Check the fields of a request's parsed JSON. Returns those that the server uses, and the
    names of known ones that it ignores.

    `SamplingParams` checks the ranges of sampling parameters later.

    Raises:
        ApiError: 400, with the field's name.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {_NAMES[type(body)]}; expected an object")
    used, idle = USED[endpoint], NO_OPS.get(endpoint, {})
    fixed = ONE_VALUE.get(endpoint, {})
    checked = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in used:
            checked[name] = used[name](name, value)
        elif name in idle:
            idle[name](name, value)
        elif name in fixed:
            if not any(value == v and type(value) is type(v) for v in fixed[name]):
                allowed = " or ".join(json.dumps(v) for v in fixed[name])
                raise _refuse(name, value, f"{allowed}, or no such field: more is not supported")
        elif not _is_empty(value):
            raise _unknown(name, [*used, *idle, *fixed])
    for name in REQUIRED[endpoint]:
        if name not in checked:
            raise ApiError(400, f"{name} is missing; every request needs it", name, "missing")
    _check_tools(checked)
    asked = checked.get("response_format", {}).get("type", "text")
    if checked.get("structured_outputs") and asked != "text":
        message = "response_format is beside structured_outputs; expected one of them"
        raise ApiError(400, message, "response_format")
    if checked.get("max_tokens") == 0 and not checked.get("echo"):
        raise _refuse("max_tokens", 0, f"an integer in 1..{MOST_TOKENS}, or 0 with echo: true")
    return checked, {name for name in idle if body.get(name) is not None} | _ignored(body)


def _ignored(body: Mapping[str, Any]) -> set[str]:
    """The names of idle entries in the messages of a checked body."""
    messages: list[dict[str, Any]] = body.get("messages") or []
    return {
        f"messages[].{key}"
        for message in messages
        for key in _IDLE
        if not _is_empty(message.get(key))
    }


def _check_tools(fields: dict[str, Any]) -> None:
    """Check that tools have different names, and that `tool_choice` names one of them."""
    names = [tool["function"]["name"] for tool in fields.get("tools", ())]
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise ApiError(400, f"tools has {name!r} twice; expected one of each", "tools")
    choice = fields.get("tool_choice", "none")
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    if wanted is not None and wanted not in names:
        known = ", ".join(names) or "none"
        message = f"tool_choice names {wanted!r}; expected one of the tools: {known}"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    if choice == "required" and not names:
        raise ApiError(400, f"tool_choice {choice!r} needs tools", "tool_choice")


def _unknown(name: str, known: list[str]) -> ApiError:
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "docs/server.md lists the supported fields"
    message = f"the field {name[:100]!r} is not supported; {hint}"
    return ApiError(400, message, name[:100], "unknown_field")
