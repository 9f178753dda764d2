"""Others at work in the same cache: replacements, removals, kills, and other users' settings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import store_writer
from helpers.store_writer import DIGEST, FIRST, attempt, filled, generation, in_tmp, no_wait, put

from mtpc.errors import CacheError, DamagedEntryError
from mtpc.store import entries as store_module
from mtpc.store.entries import SUMS, Entry, EntryStore
from mtpc.store.lookup import KEY, find, peek

NOBODY = 65534


def as_nobody(store: EntryStore, call: Callable[[EntryStore], object]) -> str:
    """The name of what a call of another user raises; nothing where it raises nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.chdir(store.root.parent)
        os.setuid(NOBODY)
        try:
            call(EntryStore(Path("store")))
        except (CacheError, OSError) as error:
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with os.fdopen(reader) as told:
        return told.read()


def test_replaced_while_read(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is replaced between its sums and its files is whole, not damaged."""
    real = store_module.file_digest

    def replace_first(path: Path) -> str:
        monkeypatch.setattr(store_module, "file_digest", real)
        store.write(DIGEST, filled(2))
        return real(path)

    monkeypatch.setattr(store_module, "file_digest", replace_first)
    assert generation(store.read(DIGEST)) == 2
    assert store_module.file_digest is real  # The replacement did happen.


@pytest.mark.parametrize("name", [FIRST, SUMS])
def test_folder_in_place_of_a_file(store: EntryStore, name: str) -> None:
    path = store.directory(DIGEST) / name
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedEntryError, match=name):
        store.read(DIGEST)


def test_file_in_place_of_an_entry(store: EntryStore) -> None:
    shutil.rmtree(store.directory(DIGEST))
    store.directory(DIGEST).write_bytes(b"")
    with pytest.raises(DamagedEntryError, match=DIGEST):
        store.read(DIGEST)


@pytest.mark.parametrize("place", [".", "entries"])
def test_unreadable_folders(store: EntryStore, place: str) -> None:
    """As for files: the other user is told; it is no miss."""
    (store.root / place).chmod(0o700)
    (told,) = attempt(store, "read", uid=NOBODY)
    assert str(told).startswith("CacheError: cannot read the graph cache ")


@pytest.mark.parametrize("place", [".", "entries"])
def test_digests_of_unreadable_folders(store: EntryStore, place: str) -> None:
    (store.root / place).chmod(0o700)
    assert as_nobody(store, EntryStore.digests) == "CacheError"


def test_removed_after_the_check(store: EntryStore) -> None:
    entry = store.read(DIGEST)
    store.remove(DIGEST)
    with pytest.raises(CacheError):
        entry.read(FIRST)


def test_removed_between_check_and_key(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find` misses an entry that is pruned meanwhile."""
    put(store)
    real = store.read

    def read_and_remove(name: str) -> Entry | None:
        entry = real(name)
        store.remove(name)
        return entry

    monkeypatch.setattr(store, "read", read_and_remove)
    assert find(store, store_writer.FIELDS) is None


class Killed(BaseException):
    """Stands for kill -9 while the replaced entry is being deleted."""


def test_trash_of_a_killed_builder(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/cache.md: what a killed builder left in tmp is removed by the next builder."""

    def die(*args: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(Killed):
            store.write(DIGEST, filled(2))
    assert in_tmp(store) != []
    store.write(DIGEST, filled(3))
    assert in_tmp(store) == []


def test_prune_during_a_replacement(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a living builder puts aside is not for `mtpc cache prune` to delete."""
    real = shutil.rmtree

    def rmtree(path: Path, *args: Any, **options: Any) -> None:
        for left in store.leftovers():  # As `mtpc cache prune` in another process.
            real(left, ignore_errors=True)
        real(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with store.lock(DIGEST, no_wait):
        assert generation(store.write(DIGEST, filled(2))) == 2
    assert generation(store.read(DIGEST)) == 2


def test_damaged_beside_a_whole_one(store: EntryStore) -> None:
    """Without a compiler any compiler's entry will do: the whole one, if another is damaged."""
    for compiler in ("g++ 12", "g++ 13"):
        put(store, **{"machine.compiler": compiler})
    first = next(name for name in store.digests() if name != DIGEST)
    (store.directory(first) / "extra").touch()
    assert find(store, store_writer.UNKNOWN) is not None


def test_remove_of_nothing(store: EntryStore) -> None:
    """Nothing is left in tmp by a removal that found no entry."""
    with pytest.raises(CacheError):
        store.remove("f" * 32)
    assert in_tmp(store) == []


def test_locks_of_a_strict_umask(store: EntryStore) -> None:
    """`leftovers` (mtpc cache ls) of another user, with a lock file of mode 0600."""
    old = os.umask(0o077)
    with store.lock("f" * 32, no_wait):
        os.umask(old)
    (store.root / "tmp" / f"{'f' * 32}-dead").mkdir()
    assert as_nobody(store, EntryStore.leftovers) == ""


def test_errors_of_tell_are_not_the_caches(store: EntryStore) -> None:
    """A closed pipe behind `tell` is no failure to write the cache."""

    def tell(line: str) -> None:
        raise BrokenPipeError("of the progress line")

    with (
        store.lock(DIGEST, no_wait),
        pytest.raises(BrokenPipeError),
        store.lock(DIGEST, tell),
    ):
        raise AssertionError


def test_a_pipe_in_place_of_a_key_keeps_nobody_waiting(store: EntryStore) -> None:
    """Opening it would wait for a writer, for ever."""
    entry = store.write(DIGEST, filled(FIRST))
    os.mkfifo(entry.directory / KEY)
    with pytest.raises(CacheError, match="neither a file nor a directory"):
        list(peek(store))
