"""Kernels that came with mtpc: a wheel may carry a library for each level (`build_backend.py`).

A start copies the one that it needs into the graph cache, once. From there it is loaded, checked
and pinned like kernels that were compiled here. Nothing is compiled, and no compiler is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtpc.backends.cpu_kernels.generate import SOURCE_DIR
from mtpc.errors import CacheWriteError
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import KEY, parse_key
from mtpc.store.machine import COMPILER
from mtpc.store.writing import copy_files

SHIPPED = SOURCE_DIR / "shipped"
"""A folder for each level, with the files of an entry of the cache. A source tree has none."""


def find_shipped(wanted: Fields) -> Path | None:
    """The folder of shipped kernels with the wanted key, except for the compiler; None if none."""
    for path in sorted(SHIPPED.glob(f"*/{KEY}")):
        found = parse_key(path.read_bytes())
        if found is not None and _but_compiler(found) == _but_compiler(wanted):
            return path.parent
    return None


def _but_compiler(fields: Fields) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name != COMPILER}


def keep_shipped(folder: Path, store: EntryStore, report: Callable[[str], None]) -> Entry | None:
    """The entry of shipped kernels, copied into the cache if it lacks them.

    Args:
        folder: what `find_shipped` found.
        store: the graph cache.
        report: receives a line where the cache cannot be written.

    Returns:
        None where the cache cannot be written.
    """
    name = digest_of(folder)
    found = store.read(name)
    if found is not None:
        return found
    try:
        with store.lock(name, report):
            return store.read(name) or store.write(name, lambda into: copy_files(folder, into))
    except CacheWriteError as error:
        report(f"the cpu kernels of this installation are loaded from it: {error}")
        return None


def is_shipped(kernels: Entry | Path) -> bool:
    """Whether loaded kernels, or those of an entry, came with this installation."""
    if isinstance(kernels, Path):
        return kernels.is_relative_to(SHIPPED)
    return kernels.digest in {digest_of(path.parent) for path in SHIPPED.glob(f"*/{KEY}")}


def digest_of(folder: Path) -> str:
    """The name that shipped kernels have in a cache."""
    return digest(parse_key((folder / KEY).read_bytes()) or {})
