"""Finding entries by their keys, and saying why one was not found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mtpc.errors import DamagedEntryError
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Difference, Fields, differences, digest
from mtpc.store.machine import COMPILER
from mtpc.store.safety import check_owner

KEY = "key.json"
"""File with an entry's key, field by field. The entry's name is its digest."""


def key_bytes(fields: Fields) -> bytes:
    """A key as an entry holds it."""
    return (json.dumps(dict(fields), indent=1, sort_keys=True) + "\n").encode()


def key_of(entry: Entry) -> dict[str, str]:
    """The key of an entry.

    Raises:
        DamagedEntryError: the entry is filed under a name that is not its key's.
    """
    fields = json.loads(entry.read(KEY)) if KEY in entry.files else {}
    if digest(fields) != entry.digest:
        raise DamagedEntryError(f"{entry.directory} is not filed under its own key")
    return fields


def find(store: EntryStore, wanted: Fields) -> Entry | None:
    """The entry of exactly this key; of any compiler where none is installed here.

    Raises:
        DamagedEntryError: there is one, but its files are not what was written.
        CacheError: another user could have written the cache.
    """
    if COMPILER in wanted:
        found = _checked(store, digest(wanted))
        return found[0] if found else None
    damage: DamagedEntryError | None = None
    for name, fields in peek(store):
        if {field: v for field, v in fields.items() if field != COMPILER} == dict(wanted):
            try:
                found = _checked(store, name)
            except DamagedEntryError as error:
                damage = error  # Another compiler's may be whole.
                continue
            if found is not None:
                return found[0]
    if damage is not None:
        raise damage
    return None


def _checked(store: EntryStore, name: str) -> tuple[Entry, dict[str, str]] | None:
    """An entry and its key, as they were written; None where there is none."""
    entry = store.read(name)
    if entry is None:
        return None
    try:
        return entry, key_of(entry)
    except DamagedEntryError:
        if store.directory(name).exists():
            raise
        return None  # Removed since it was read.


def peek(store: EntryStore) -> Iterator[tuple[str, dict[str, str]]]:
    """Names and keys of all entries, unchecked: to choose by, never to trust.

    Raises:
        CacheError: another user could have written one.
    """
    for name in store.digests():
        try:
            path = store.directory(name) / KEY
            check_owner(path)  # Besides, opening what is no file may wait for ever.
            fields = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # Damaged, or removed meanwhile; whoever wants this very entry is told.
        if isinstance(fields, dict):
            yield name, fields


def readable(store: EntryStore) -> Iterator[tuple[Entry, dict[str, str]]]:
    """Every undamaged entry with its key."""
    for name in store.digests():
        try:
            found = _checked(store, name)
        except DamagedEntryError:
            continue  # Whoever wants this very entry is told.
        if found is not None:
            yield found


@dataclass(frozen=True)
class Nearest:
    """The entry that differs least from what is wanted, and where."""

    digest: str
    differences: list[Difference]


def nearest(store: EntryStore, wanted: Fields) -> Nearest | None:
    """The entry of the same kind with the fewest differences; None in a cache without any."""
    rows = [
        Nearest(name, _known(differences(fields, wanted), wanted))
        for name, fields in peek(store)
        if fields.get("kind") == wanted.get("kind")
    ]
    return min(rows, key=lambda row: len(row.differences), default=None)


def _known(found: list[Difference], wanted: Fields) -> list[Difference]:
    """Without the compiler where there is none to compare with."""
    return [d for d in found if d.field != COMPILER or COMPILER in wanted]
