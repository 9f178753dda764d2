"""How models write tool calls: one format for each family of chat templates.

`find_format` finds a checkpoint's format by looking for each format's marks in the chat template.
The names are those of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtpc.server.lark import Lark

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """A call that a model has written: the function's name, and the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls, by vLLM's name of the format.

    Attributes:
        marks: texts that every chat template of this format contains.
        begin: what a call begins with; it ends with `end`.
        parse: (text between `begin` and `end`, schema of each function) -> the call, or None.
        grammar: (Lark, function's name, schema) -> lark text of what is between `begin` and `end`.
        opening: text before the first call; `between` and `closing`: between two, after the last.
        head: matches the text before the arguments; its group is the function's name. The arguments
            follow as JSON up to `tail` and are streamed. None: the arguments are sent when the call
            is complete.
        tail: the text after the arguments, with space around it.
        takes_text: whether the template takes the arguments of earlier calls as JSON text instead
            of an object.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str
    parse: Callable[[str, Mapping[str, Schema]], Call | None]
    grammar: Callable[[Lark, str, Schema], str]
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    head: re.Pattern[str] | None = None
    tail: str = ""
    takes_text: bool = False

    def texts(self) -> tuple[str, ...]:
        """The texts that mark calls; a tokenizer may have special tokens for them."""
        return tuple(text for text in (self.begin, self.end, self.opening, self.closing) if text)


_HERMES_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_FENCE_HEAD = re.compile(r"\s*function<｜tool▁sep｜>(\S+)\n```json\n")
_BARE_HEAD = re.compile(r"\s*(\S+?)<｜tool▁sep｜>")


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse_hermes(text: str, schemas: Mapping[str, Schema]) -> Call | None:
    """`{"name": "f", "arguments": {...}}`, in any order."""
    call = _object(text)
    if call is None or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return Call(call["name"], json.dumps(arguments, ensure_ascii=False))


def without_tail(text: str, tail: str) -> str:
    """Arguments without the text after them.

    Like all that reads an answer here, it takes time in proportion to the text, whatever a model
    writes: it runs in the event loop.
    """
    return text.rstrip().removesuffix(tail).rstrip()


def _between(text: str, begin: str, middle: str, end: str) -> Iterator[tuple[str, str]]:
    """The texts before and after each `middle`, from a `begin` to the first `end`."""
    start = text.find(begin)
    while start >= 0:
        start += len(begin)
        half = text.find(middle, start)
        stop = text.find(end, half + len(middle)) if half >= 0 else -1
        if stop < 0:
            return
        yield text[start:half], text[half + len(middle) : stop]
        start = text.find(begin, stop + len(end))


def _parse_headed(head: re.Pattern[str], tail: str) -> Callable[..., Call | None]:
    """A parser of a name (the group of `head`), and then the arguments up to `tail`."""

    def parse(text: str, schemas: Mapping[str, Schema]) -> Call | None:
        match = head.match(text)
        arguments = without_tail(text[match.end() :], tail) if match else ""
        return Call(match[1], arguments) if match and _object(arguments) is not None else None

    return parse


def _headed_grammar(start: str, end: str = "") -> Callable[[Lark, str, Schema], str]:
    """A grammar of JSON arguments between two texts. In `start`, NAME stands for the function."""

    def grammar(lark: Lark, name: str, schema: Schema) -> str:
        head = lark.text(start.replace("NAME", name))
        return f"{head} {lark.json(schema)} {lark.text(end) if end else ''}"

    return grammar


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _properties(schema: Schema) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, dict) else {}


def _typed(values: list[tuple[str, str]], schema: Schema) -> str:
    """Arguments as JSON. Values of type string stay as they are; others are read as JSON."""
    arguments: dict[str, Any] = {}
    known = _properties(schema)
    for key, text in values:
        try:
            arguments[key] = text if _is_text(known.get(key)) else json.loads(text)
        except (ValueError, RecursionError):
            arguments[key] = text
    return json.dumps(arguments, ensure_ascii=False)


_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>\s*)?$", re.DOTALL)


def _parse_qwen(text: str, schemas: Mapping[str, Schema]) -> Call | None:
    """`<function=f>`, then `<parameter=key>` with a value for each argument."""
    match = _FUNCTION.match(text)
    if match is None:
        return None
    name, values = match[1].strip(), _between(match[2], "<parameter=", ">", "</parameter>")
    stripped = [(key, text.removeprefix("\n").removesuffix("\n")) for key, text in values if key]
    return Call(name, _typed(stripped, schemas.get(name, {})))


def _parse_glm(text: str, schemas: Mapping[str, Schema]) -> Call | None:
    """The function's name, then `<arg_key>` and `<arg_value>` for each argument."""
    name = text.partition("<arg_key>")[0].strip()
    if not name or any(space in name for space in " \n<{"):
        return None
    values, begin = _between(text, "<arg_key>", "</arg_key>", "</arg_value>"), "<arg_value>"
    split = [(key.strip(), value.lstrip()) for key, value in values]
    given = [(key, text.removeprefix(begin)) for key, text in split if text.startswith(begin)]
    return Call(name, _typed(given, schemas.get(name, {})))


def _each_argument(lark: Lark, schema: Schema, before: str, after: str) -> str:
    """A grammar of the arguments in the schema's order. In `before`, KEY stands for the key."""
    required = schema.get("required") or []
    parts = []
    for key, kind in _properties(schema).items():
        start = lark.text(before.replace("KEY", key))
        value = lark.until(after) if _is_text(kind) else f"{lark.json(kind)} {lark.text(after)}"
        often = "" if key in required else "?"
        parts.append(f"({start} {value}){often}")
    return " ".join(parts)


def _qwen_grammar(lark: Lark, name: str, schema: Schema) -> str:
    arguments = _each_argument(lark, schema, "<parameter=KEY>\n", "\n</parameter>\n")
    start, end = lark.text(f"\n<function={name}>\n"), lark.text("</function>\n")
    return f"{start} {arguments} {end}"


def _glm_grammar(lark: Lark, name: str, schema: Schema) -> str:
    before, after = "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"
    start = lark.text(f"{name}\n")
    return f"{start} {_each_argument(lark, schema, before, after)}"


_DEEPSEEK: dict[str, Any] = {
    "begin": "<｜tool▁call▁begin｜>",
    "end": "<｜tool▁call▁end｜>",
    "opening": "<｜tool▁calls▁begin｜>",
    "closing": "<｜tool▁calls▁end｜>",
    "takes_text": True,
}
_CALL: dict[str, Any] = {"begin": "<tool_call>", "end": "</tool_call>"}
FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "deepseek_v3",
        ("<｜tool▁sep｜>", "```json"),
        parse=_parse_headed(_FENCE_HEAD, "```"),
        grammar=_headed_grammar("function<｜tool▁sep｜>NAME\n```json\n", "\n```"),
        head=_FENCE_HEAD,
        tail="```",
        **_DEEPSEEK,
    ),
    ToolFormat(
        "deepseek_v31",
        ("<｜tool▁sep｜>",),
        parse=_parse_headed(_BARE_HEAD, ""),
        grammar=_headed_grammar("NAME<｜tool▁sep｜>"),
        head=_BARE_HEAD,
        **{**_DEEPSEEK, "between": ""},
    ),
    ToolFormat(
        "glm45", ("<tool_call>", "<arg_key>"), parse=_parse_glm, grammar=_glm_grammar, **_CALL
    ),
    ToolFormat(
        "qwen3_xml",
        ("<tool_call>", "<function=", "<parameter="),
        parse=_parse_qwen,
        grammar=_qwen_grammar,
        **_CALL,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>",),
        parse=_parse_hermes,
        grammar=_headed_grammar('\n{"name": "NAME", "arguments": ', "}\n"),
        head=_HERMES_HEAD,
        tail="}",
        **_CALL,
    ),
)
"""The first format whose marks are all in the template counts: later formats have fewer marks."""
PARSERS = ("auto", "none", *(form.name for form in FORMATS))
"""Values of `--tool-call-parser`."""


def find_format(name: str, template: str) -> ToolFormat | None:
    """The format of this name of `PARSERS`, or with "auto" the format of a chat template's
    source."""
    for form in FORMATS:
        if form.name == name or (name == "auto" and all(mark in template for mark in form.marks)):
            return form
    return None
