"""Keys: named fields whose every difference is a miss with a reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Fields = Mapping[str, str]
"""What decides the result of a compilation, by dotted name."""

_SHOWN = 60
"""Characters of a value that a reason shows."""


@dataclass(frozen=True)
class Difference:
    """One field in which a cached entry is not what is wanted; None where a side lacks it."""

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
    """32 hexadecimal digits of SHA-256 over all fields."""
    canonical = json.dumps(dict(fields), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def differences(cached: Fields, wanted: Fields) -> list[Difference]:
    """Fields that differ, by name."""
    return [
        Difference(name, cached.get(name), wanted.get(name))
        for name in sorted(cached.keys() | wanted.keys())
        if cached.get(name) != wanted.get(name)
    ]


def hash_of(parts: Iterable[bytes]) -> str:
    """16 hexadecimal digits of SHA-256 over parts, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]
