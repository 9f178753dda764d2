"""Writes grammars in llguidance's dialect of Lark.

If the tokenizer has one token for a text, such as `<tool_call>`, the grammar asks for that token,
which llguidance writes as `<[ID]>`. Free text never contains such a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models write it. With whitespace of any length, a text might never end."""
_ANY = r"/(.|\n)*/"
_SLASH = re.compile(r"(\\[^/])|\\?/")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Lark:
    """Collects the rules of one grammar. `tokens` has the ids of texts that are one token."""

    def __init__(self, tokens: Mapping[str, int]):
        self._tokens = tokens
        names = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(names)})") if names else None
        self.rules: list[str] = []

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        parts = self._pattern.split(text) if self._pattern else [text]
        return " ".join(self._literal(part) for part in parts if part) or '""'

    def _literal(self, part: str) -> str:
        known = self._tokens.get(part)
        return json.dumps(part, ensure_ascii=False) if known is None else f"<[{known}]>"

    def until(self, end: str) -> str:
        """An expression for any text up to the first `end`, with it."""
        match = self._pattern.search(end) if self._pattern else None
        if match is None:
            return self._rule(_ANY, f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        # The special token ends the free text; what precedes it in `end` counts as free text.
        return f"{self._rule(_ANY)} {self.text(end[match.start() :])}"

    def json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}")

    def structured(self, wanted: Mapping[str, Any]) -> str:
        """An expression for what vLLM's `structured_outputs` asks for: it has one entry."""
        ((kind, entry),) = wanted.items()
        if kind == "choice":
            return f"({' | '.join(map(self.text, entry))})"
        if kind == "grammar":
            return self._rule(f"%lark {{\n{entry}\n}}")
        if kind == "regex":  # A slash would end it, also behind a backslash.
            slashes = _SLASH.sub(lambda each: each[0] if each[1] else r"\x2f", entry)
            return self._rule(f"/{slashes}/".replace("\n", r"\n"))
        return self.json(entry if kind == "json" else ANY_OBJECT)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def grammar(self, start: str) -> str:
        """The whole grammar, of an expression for all text."""
        return "\n".join([f"start: {start}", *self.rules])
