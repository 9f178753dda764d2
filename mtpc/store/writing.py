"""How entries are written, locked and removed. A process that only reads them needs none of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtpc.errors import CacheError, CacheWriteError
from mtpc.store.entries import SUMS, Entry, EntryStore, render_sums
from mtpc.store.safety import DIRECTORY_MODE, FILE_MODE, check_owner
from mtpc.store.scratch import is_old, remove_abandoned
from mtpc.weights.plain_file import file_digest

_POLL_S, _REMIND_S = 0.05, 2.0


class StoreWriter:
    """Writes the entries of a store, whose methods of the same names say what these do.

    Args:
        store: the store.
    """

    def __init__(self, store: EntryStore):
        self._store, self.root, self._entries = store, store.root, store.root / "entries"

    def prepare(self) -> None:
        """See `EntryStore.prepare`."""
        remove_abandoned()
        with self._writing():
            for name in ("entries", "locks", "tmp"):
                self._make(name)
                if not os.access(self.root / name, os.W_OK):
                    raise PermissionError(f"no permission to write {self.root / name}")
        for path in self.leftovers():
            if is_old(path):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def lock(self, digest: str, tell: Callable[[str], None]) -> Iterator[None]:
        """See `EntryStore.lock`."""
        with self._writing():
            self._make("locks")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            handle = os.open(self.root / "locks" / digest, flags, FILE_MODE)
        try:
            self._acquire(handle, tell)
            yield
        finally:
            os.close(handle)

    def _acquire(self, handle: int, tell: Callable[[str], None]) -> None:
        """Wait for an exclusive lock, and report the wait from time to time."""
        told = time.monotonic() - _REMIND_S
        while not self._take(handle):
            if time.monotonic() - told >= _REMIND_S:
                told = time.monotonic()
                tell("waiting for another process that builds this entry")
            time.sleep(_POLL_S)

    def _take(self, handle: int) -> bool:
        """Try to lock a file; returns whether it did."""
        with self._writing():  # A file system without locks raises OSError.
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if os.fstat(handle).st_uid == os.geteuid():
                os.fchmod(handle, FILE_MODE)  # The umask may have removed bits.
        return True

    def write(self, digest: str, fill: Callable[[Path], None]) -> Entry:
        """See `EntryStore.write`."""
        with self._writing():
            for name in ("entries", "tmp"):
                self._make(name)
            # Only the holder of the lock writes here, so these are from a process that was killed.
            for leftover in (self.root / "tmp").glob(f"{digest}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f"{digest}-", dir=self.root / "tmp"))
            try:
                fill(scratch)
                _seal(scratch)
                self._install(scratch, digest)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        entry = self._store.read(digest)
        if entry is None:
            raise CacheError(
                f"{self._entries / digest} was removed right after it was written; start again"
            )
        return entry

    def remove(self, digest: str) -> None:
        """See `EntryStore.remove`."""
        with self._writing():
            shutil.rmtree(self._put_aside(digest), ignore_errors=True)

    def _put_aside(self, digest: str) -> Path:
        """Move an entry to `tmp`, where the next write of this entry would clear it."""
        self._make("tmp")
        trash = Path(tempfile.mkdtemp(prefix=f"{digest}-trash-", dir=self.root / "tmp"))
        try:
            os.rename(self._entries / digest, trash / digest)
        except OSError:
            trash.rmdir()
            raise
        return trash

    def leftovers(self) -> list[Path]:
        """See `EntryStore.leftovers`."""
        return self._store.listed("tmp", lambda path: not self._is_locked(path))

    def _is_locked(self, scratch: Path) -> bool:
        lock = self.root / "locks" / scratch.name.partition("-")[0]
        if not lock.is_file():
            return False
        with lock.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _install(self, scratch: Path, digest: str) -> None:
        target = self._entries / digest
        trash = self._put_aside(digest) if target.exists() else None
        try:
            os.rename(scratch, target)
        except OSError:
            if trash is not None:
                with suppress(OSError):
                    os.rename(trash / digest, target)  # The old entry is better than none.
            raise
        _sync(self._entries)
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)

    def _make(self, name: str) -> None:
        """Create a folder of the store, and the store, which no other user may write."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, self.root / name):
            if not path.exists():
                path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                path.chmod(DIRECTORY_MODE)  # The umask may have removed bits.
            check_owner(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheWriteError(
                f"cannot write the graph cache {self.root}: {error}; free space, make it "
                "writable, or choose another directory with cache_dir (MTPC_CACHE_DIR)"
            ) from error


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of one directory into another; see `EntryStore.write`."""
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)


def _seal(directory: Path) -> None:
    """Write the checksums, set the modes, and flush everything to disk."""
    files = {path.name: file_digest(path) for path in directory.iterdir()}
    (directory / SUMS).write_bytes(render_sums(files))
    for path in directory.iterdir():
        path.chmod(FILE_MODE)
        _sync(path)
    directory.chmod(DIRECTORY_MODE)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
