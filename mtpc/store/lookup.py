"""Finding cache entries by their keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from mtpc.errors import DamagedEntryError
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.machine import COMPILER
from mtpc.store.safety import check_owner

KERNELS = "kernels"
"""The kind of entries that hold compiled code."""
KEY = "key.json"
"""File with the key of an entry. The digest of the key is the name of the entry."""


def key_bytes(fields: Fields) -> bytes:
    """The contents of the file `KEY` for a key."""
    return (json.dumps(dict(fields), indent=1, sort_keys=True) + "\n").encode()


def keep(store: EntryStore, fields: Fields, files: Mapping[str, bytes]) -> Entry:
    """Write the entry of a key, whose lock the caller holds; see `EntryStore.write`."""

    def fill(directory: Path) -> None:
        for name, data in {**files, KEY: key_bytes(fields)}.items():
            (directory / name).write_bytes(data)

    return store.write(digest(fields), fill)


def key_of(entry: Entry) -> dict[str, str]:
    """The key of an entry.

    Raises:
        DamagedEntryError: it has no key, or the digest of the key is not the name of the entry.
    """
    fields = parse_key(entry.read(KEY)) if KEY in entry.files else {}
    if fields is None or digest(fields) != entry.digest:
        raise DamagedEntryError(f"{entry.directory} holds the key of another entry")
    return fields


def parse_key(data: bytes) -> dict[str, str] | None:
    """The fields in the bytes of a file `KEY`, or None if they are not fields: text by name."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: it is nested too deeply.
        return None
    is_key = isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values())
    return fields if is_key else None


def find(store: EntryStore, wanted: Fields) -> Entry | None:
    """The entry with exactly this key; None if there is none.

    If no C++ compiler is installed, the key of the kernels has no field for it, and entries of all
    compilers match.

    Raises:
        DamagedEntryError: the only matching entries are damaged.
        CacheError: another user could have written the cache.
    """
    if COMPILER in wanted or wanted.get("kind") != KERNELS:
        return _checked(store, digest(wanted))
    damage: DamagedEntryError | None = None
    for name, fields in peek(store):
        if {field: v for field, v in fields.items() if field != COMPILER} == dict(wanted):
            try:
                found = _checked(store, name)
            except DamagedEntryError as error:
                damage = error  # The entry of another compiler may be good.
                continue
            if found is not None:
                return found
    if damage is not None:
        raise damage
    return None


def _checked(store: EntryStore, name: str) -> Entry | None:
    """An entry, after it and its key are checked; None if there is no such entry."""
    entry = store.read(name)
    try:
        if entry is not None:
            key_of(entry)
        return entry
    except DamagedEntryError:
        if store.directory(name).exists():
            raise
        return None  # It was removed after it was read.


def peek(store: EntryStore) -> Iterator[tuple[str, dict[str, str]]]:
    """Names and keys of all entries, without checks: for choosing an entry, not for using it.

    Raises:
        CacheError: another user could have written an entry.
    """
    for name in store.digests():
        try:
            path = store.directory(name) / KEY
            check_owner(path)  # Also refuses special files; reading one could block forever.
            fields = parse_key(path.read_bytes())
        except OSError:
            continue  # Removed meanwhile. A lookup of this entry raises an error.
        if fields is not None:
            yield name, fields
