"""Random schemas: a grammar that goes on, or the library's own words with status 400."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.char_model import char_checkpoint

from mtpc.errors import GrammarError
from mtpc.server.errors import ApiError, api_error
from mtpc.server.grammars import Grammars
from mtpc.server.lark import Lark
from mtpc.weights.served_model import ServedModel

pytest.importorskip("llguidance")
_LEAVES: tuple[Any, ...] = (
    *({}, True, False, None, 7, [], "string", {"type": "string"}, {"type": ["string", "null"]}),
    *({"type": "integer", "minimum": 5, "maximum": 3}, {"multipleOf": 10**40}, {"enum": []}),
    *({"type": "string", "pattern": "(a{1,999}){1,999}"}, {"type": "string", "pattern": "(?=a)"}),
    *({"type": "string", "format": "date-time"}, {"const": {"a": [1, "\u0000"]}}, {"type": "pet"}),
    *({"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}, {"$ref": "http://x/y"}),
    *({"type": "string", "maxLength": 10**9}, {"minLength": -1}, {"x-guidance": {"a": 1}}),
)


def random_schema(chance: random.Random, depth: int = 4) -> Any:
    """A schema, often of contradictions, cycles or very many parts."""
    if not depth or chance.random() < 0.3:
        return chance.choice(_LEAVES)
    count = chance.choice((0, 1, 2, 2, 3, 300 if depth > 2 else 2))
    parts = [random_schema(chance, depth - 1) for _ in range(min(count, 3))] or [{}]
    parts = [parts[i % len(parts)] for i in range(count)]
    kind = chance.choice(("anyOf", "oneOf", "allOf", "array", "tuple", "object", "object", "defs"))
    if kind in ("anyOf", "oneOf", "allOf"):
        return {kind: parts}
    if kind == "array":
        low = chance.choice((0, 1, 10**6))
        return {"type": "array", "items": parts[0] if parts else {}, "minItems": low}
    if kind == "tuple":
        return {"type": "array", "prefixItems": parts}
    if kind == "defs":
        return {"$ref": "#/$defs/a", "$defs": {"a": parts[0] if parts else {}}}
    names = [f"p{i}" for i in range(count)]
    needed = [name for name in names if chance.random() < 0.5]
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": needed,
    }


def test_random_schemas(chances: Callable[..., Any], tmp_path: Path) -> None:
    """Also after some tokens: the engine hands the error on as the cause of its own."""
    served = ServedModel("x", 96, (1,), char_checkpoint(tmp_path))
    grammars, seen = Grammars(served), {"taken": 0, "refused": 0}
    for chance in chances():
        schema, start = random_schema(chance), time.process_time()
        lark = Lark(served.own_tokens)
        given = schema if isinstance(schema, dict) else {}
        try:
            (matcher,) = grammars.matchers(lark.grammar(lark.json(given)), 1, "response_format")
            for _ in range(20):
                words = torch.full((3,), -1, dtype=torch.int32)
                matcher.fill_mask(words)
                allowed = [i for i in range(96) if int(words[i // 32]) >> i % 32 & 1]
                token = chance.choice(allowed)
                if token in served.stop_ids:
                    break
                assert matcher.advance(token), (chance, given)
            seen["taken"] += 1
        except ApiError as error:
            seen["refused"] += 1
            told = GrammarError("its grammar failed")
            told.__cause__ = error
            said = api_error(told)
            is_told = said.status == 400 and "response_format cannot be followed: " in str(said)
            assert is_told, (chance, given, said)
        assert time.process_time() - start < 10, (chance, given)
    assert min(seen.values()) > 3, seen
