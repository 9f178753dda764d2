"""Cache keys: named fields. A key matches if all fields are equal; a difference explains a miss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Fields = Mapping[str, str]
"""Everything that decides the result of a compilation, by dotted name."""

_SHOWN = 60
"""A reason shows at most this many characters of a value."""


@dataclass(frozen=True)
class Difference:
    """One field that differs between a cached entry and the wanted key.

    Attributes:
        field: its name.
        cached: value in the entry; None if the entry lacks the field.
        wanted: value in the wanted key; None if the key lacks the field.
    """

    field: str
    cached: str | None
    wanted: str | None

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.cached)} -> {_shown(self.wanted)}"


def _shown(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."


def digest(fields: Fields) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of all fields."""
    canonical = json.dumps(dict(fields), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def differences(cached: Fields, wanted: Fields) -> list[Difference]:
    """The fields that differ, sorted by name."""
    return [
        Difference(name, cached.get(name), wanted.get(name))
        for name in sorted(cached.keys() | wanted.keys())
        if cached.get(name) != wanted.get(name)
    ]


def hash_of(parts: Iterable[bytes]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all parts, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]
