"""Hostile input for a server, fixed and random: chat templates, requests, and their fields."""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any

from mtpc.errors import CheckpointError, RequestError
from mtpc.server.chat import ChatTemplate

MESSAGE = {"role": "user", "content": "a"}

SWELLING = (
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ [1]|tojson(indent=999999999) }}",
    "{{ [1]|batch(10**9, 'x')|list|length }}",
    "{{ lipsum(n=10**9) }}",
    "{{ ('\\t'*1000000).expandtabs(16000000)|length }}",
    "{{ ('a'*1000000).translate({97: 'x'*1000000})|length }}",
    "{{ 'a'.zfill(2**30) }}",
    "{{ 10**70000 }}",
    "{{ (1).to_bytes(2**30,'big')|length }}",
    "{{ " + "((((" * 50000,
    "{{ " + "1" * 6000 + " }}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ x" + ".a" * 20000 + " }}",
    "{% for i in x %}" * 30 + "{% endfor %}" * 30,
    "{{ '\\ud800' }}",
    "{{ strftime_now('\\ud800') }}",
    "{{ raise_exception('x' * 10 ** 6) }}",
    "{{ raise_exception('\\ud800') }}",
)
"""Templates that need too much time, memory or depth."""

SLOWER = (
    "{{ 2 ** (2 ** 40) }}",
    "{{ ('a '*1000000)|wordwrap(1, wrapstring='x'*1000000)|length }}",
    "{% for i in range(9999) %}{% for j in range(9999) %}aaaaaaaa{% endfor %}{% endfor %}",
    "{{ (['a'*10000000]*1000)|sum(start='')|length }}",
    "{{ range(99999)|map('string')|map('center', 16000000)|map('length')|sum }}",
    "{{ (range(99999)|list * 100)|groupby(0)|length }}",
    "{% set a=[1]*10000000 %}{{ [a]*1000 }}",
    "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + ("{% call f(1) %}" * 18 + "x" * 100 + "{% endcall %}" * 18),
)
"""Those that are refused after a second or more."""

DOUBLING = (
    "{{ n.x }}",
    "{{ n.x|tojson }}",
    "{{ n.x|string|length }}",
    "{{ n.x|pprint|length }}",
    "{{ 'a%s' % n.x }}",
    "{{ '{}'.format(n.x)|length }}",
)
"""Operations on a small nested list whose text would have 2**60 characters."""

_VALUES = (
    *("messages", "messages[0].content", "tools", "x", "1", "0", "-1", "1.5", "10**9", "2**40"),
    *("'a'", "''", "'%s%9999d'", "'{:>99999}'", "[1, 'a']", "{}", "{'a': [1]}", "none", "true"),
    *("range(99999)", "namespace(x=1)", "('a'*100000)", "([1]*100000)", "'\\ud800'", "'\\x00'"),
    *("joiner", "cycler", "lipsum", "dict", "raise_exception", "strftime_now", "self", "loop"),
)
_FILTERS = (
    *("abs", "attr", "batch", "capitalize", "center", "count", "d", "dictsort", "e", "escape"),
    *("filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent", "int"),
    *("items", "join", "last", "length", "list", "lower", "map", "max", "min", "pprint", "random"),
    *("reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr"),
    *("slice", "sort", "string", "striptags", "sum", "title", "tojson", "trim", "truncate"),
    *("unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr", "nothing"),
)
_METHODS = (
    *("append", "center", "copy", "encode", "expandtabs", "format", "format_map", "get", "items"),
    *("join", "keys", "ljust", "replace", "split", "splitlines", "title", "translate", "update"),
    *("zfill", "__class__", "__mro__", "__init__", "__globals__", "mro", "gi_frame", "f_back"),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "is", "and", "or", "if")


def rendered(source: str) -> str:
    """Render a template within a few seconds; returns "" or the text of the error."""
    start, message = time.monotonic(), ""
    try:
        ChatTemplate(source, {}).render([MESSAGE], {})
    except (CheckpointError, RequestError) as error:
        message = str(error)
        assert "the chat template" in message, source
        assert len(message) < 1000, source
    # Limits are of the processor's time: this has room for a busy machine.
    assert time.monotonic() - start < 30, source
    return message


def random_template(chance: random.Random, size: int) -> str:
    """A random template of about `size` expressions and statements; most compile."""
    return "".join(_statement(chance, 0) for _ in range(chance.randint(1, size)))


def _statement(chance: random.Random, depth: int) -> str:
    kind = chance.randrange(10 if depth < 3 else 4)
    value = _expression(chance, 0)
    if kind < 4:
        return "{{ " + value + " }}"
    inner = "".join(_statement(chance, depth + 1) for _ in range(chance.randint(0, 3)))
    if kind < 6:
        return "{% for x in " + value + " %}" + inner + "{% endfor %}"
    if kind == 6:
        return "{% if " + value + " %}" + inner + "{% endif %}"
    if kind == 7:
        return "{% set x = " + value + " %}" + inner
    if kind == 8:
        return "{% macro x(x) %}" + inner + "{{ x(x) }}{% endmacro %}"
    return chance.choice(("{% break %}", "{% endfor %}", "{{ ", "{% include 'a' %}", "{#", "%}"))


def _expression(chance: random.Random, depth: int) -> str:
    value = chance.choice(_VALUES)
    if depth > 4:
        return value
    kind, more = chance.randrange(6), lambda: _expression(chance, depth + 1)
    if kind == 0:
        return f"({more()} {chance.choice(_OPERATORS)} {more()})"
    if kind in (1, 2):
        given = ", ".join(more() for _ in range(chance.randint(0, 2)))
        return f"{more()}|{chance.choice(_FILTERS)}" + (f"({given})" if given else "")
    if kind == 3:
        given = ", ".join(more() for _ in range(chance.randint(0, 2)))
        return f"({more()}).{chance.choice(_METHODS)}({given})"
    if kind == 4:
        return f"({more()})[{more()}]"
    return value


VALUES: tuple[Any, ...] = (
    *(None, "x", "", -1, 0, 1, 3, 2**40, 2**63, 2**70, 10**400, [], {}, True, 1.5, -1e300),
    *(
        float("nan"),
        float("inf"),
        [None],
        {"a": {}},
        [1] * 5,
        "\0",
        "\ud800",
        "w7 " * 100,
        96,
        -(2**63),
    ),
    *([[7, 8]], ["w7", "w8"], {"type": "json_object"}, "required", "auto", {"5": 4.0}, [MESSAGE]),
)
"""Values for fields, most of them wrong."""
_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "logprobs", "top_logprobs", "top_k", "min_p", "repetition_penalty", "user"),
    *("min_tokens", "ignore_eos", "chat_template_kwargs", "add_special_tokens", "tokens", "tools"),
    *("tool_choice", "parallel_tool_calls", "response_format", "return_token_strs", "best_of"),
    *("echo", "suffix", "functions", "modalities", "service_tier", "metadata", "nothing", ""),
)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def random_request(chance: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and its fields, some of them wrong."""
    path = chance.choice(PATHS)
    fields: dict[str, Any] = {"model": model}
    if path == "/detokenize":
        fields["tokens"] = [7, 8]
    elif path == "/v1/chat/completions" or (path == "/tokenize" and chance.random() < 0.5):
        fields["messages"] = [dict(MESSAGE)]
    else:
        fields["prompt"] = [7, 8] if path == "/v1/completions" else "w7 w8"
    if path.startswith("/v1"):
        fields |= {"max_tokens": 3, "temperature": 0, "stream": chance.random() < 0.3}
        if "messages" in fields and chance.random() < 0.3:
            fields |= chance.choice(({"tools": [_TOOL]}, {"response_format": _FORMAT}))
    fields = json.loads(json.dumps(fields))  # Parts that are changed are nobody else's.
    for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
        _change(chance, fields)
    return path, fields


def random_body(chance: random.Random, model: str) -> tuple[str, bytes]:
    """A path and a body: JSON that is damaged, or has a part of itself many times."""
    path, fields = random_request(chance, model)
    data = json.dumps(fields, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    for _ in range(chance.choice((0, 1, 1, 2))):
        start, end = sorted(chance.choices(range(len(data) + 1), k=2))
        kind, middle = chance.randrange(5), data[start:end]
        if kind == 0:  # Also brackets, commas and escapes.
            middle = bytes(
                chance.choices(rb'[]{},:"\\u\ud8 0.-eE\x00\xff\xc3', k=chance.randint(1, 8))
            )
        elif kind == 1:
            middle = b""
        elif kind < 4:
            middle *= chance.choice((2, 3, 2**15 // (len(middle) + 1) + 1))
        else:
            middle = chance.choice((b"[", b'{"a":', b'"', b"1")) * chance.choice((1, 9000))
        data = (data[:start] + middle + data[end:])[: 2**16]
    return path, data


def _change(chance: random.Random, fields: dict[str, Any]) -> None:
    """Replace a value: a field, or one deep inside a field."""
    part: Any = fields
    names: list[Any] = [*fields, *_FIELDS]
    while True:
        name = chance.choice(names)
        inner = part[name] if isinstance(part, list) else part.get(name)
        if not inner or not isinstance(inner, (dict, list)) or chance.random() < 0.4:
            break
        part, names = inner, [*inner] if isinstance(inner, dict) else [*range(len(inner))]
    part[name] = copy.deepcopy(chance.choice(VALUES))


_HEADERS = (
    *(
        b"Host: localhost",
        b"Host: evil.example",
        b"host:",
        b"Content-Length: 5",
        b"Content-Length: -1",
    ),
    *(
        b"Content-Length: 99999999999999999999",
        b"Content-Length: 0x10",
        b"Transfer-Encoding: chunked",
    ),
    *(b"Transfer-Encoding: gzip, chunked", b"Connection: keep-alive", b"Connection: upgrade"),
    *(b"Upgrade: h2c", b"Expect: 100-continue", b"Expect: x", b"Content-Type: text/plain", b"X: y"),
    *(b"Content-Type: application/json; charset=utf-16", b" folded", b"no colon", b"\xff: \xff"),
    *(b"A" * 70_000 + b": b", b"X: " + b"y" * 70_000, b"Authorization: Bearer \xe9", b"\0: \0"),
)
_LINES = (
    *(
        b"GET /v1/models HTTP/1.1",
        b"GET /health HTTP/1.0",
        b"GET /metrics HTTP/1.1",
        b"PRI * HTTP/2.0",
    ),
    *(b"POST /v1/completions HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"OPTIONS * HTTP/1.1"),
    *(b"GET  /health HTTP/1.1", b"GET /" + b"x" * 70_000 + b" HTTP/1.1", b"GET /%ff%00 HTTP/1.1"),
    *(
        b"GET http://[::1/ HTTP/1.1",
        b"CONNECT a:1 HTTP/1.1",
        b"get /health HTTP/1.1",
        b"\x16\x03\x01",
    ),
    *(b"GET /v1/models/\xc3\xa9 HTTP/1.1", b"GET /health HTTP/9.9", b"GET /health"),
)


def random_bytes(chance: random.Random, body: bytes) -> bytes:
    """Bytes of a client: one request or several, some of them invalid."""
    return b"".join(_one_request(chance, body) for _ in range(chance.choice((1, 1, 2, 3))))


def _one_request(chance: random.Random, body: bytes) -> bytes:
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
    ]
    chunked = chance.random() < 0.3
    lines.append(b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body))
    if chance.random() < 0.4:
        lines[0] = chance.choice(_LINES)
    for _ in range(chance.choice((0, 0, 1, 2))):
        lines.insert(chance.randint(1, len(lines)), chance.choice(_HEADERS))
    if chance.random() < 0.2:
        del lines[chance.randrange(len(lines))]
    end = chance.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"))
    data = bytearray(end.join([*lines, b"", b""]) + (_chunks(chance, body) if chunked else body))
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        data[chance.randrange(min(len(data), 300))] = chance.randrange(256)
    return bytes(data[: chance.randint(1, len(data))] if chance.random() < 0.15 else data)


def _chunks(chance: random.Random, body: bytes) -> bytes:
    parts, rest = [], body
    while rest:
        size = chance.randint(1, len(rest))
        extension = chance.choice((b"", b"", b";a=b", b";" + b"x" * 5000))
        parts.append(b"%x%s\r\n%s\r\n" % (size, extension, rest[:size]))
        rest = rest[size:]
    wrong = chance.choice((b"", b"", b"", b"-1\r\n", b"ffffffffffffffffff\r\n", b"zz\r\n"))
    trailer = chance.choice((b"", b"", b"a: b\r\n", b"Content-Length: 3\r\n"))
    return b"".join([*parts, wrong, b"0\r\n", trailer, b"\r\n"])
