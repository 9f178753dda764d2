"""Entries on disk: written whole or not at all, and checked to the last bit before they are used.

    ROOT/entries/DIGEST/   an entry: its files, and SHA256SUMS over all of them
    ROOT/locks/DIGEST      held while an entry is built
    ROOT/tmp/              entries being written

`SHA256SUMS` has the format of the tool `sha256sum`, so `sha256sum -c SHA256SUMS` checks an entry
without mtpc. What the files mean is not known here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.store.safety import DIRECTORY_MODE, FILE_MODE, check_owner

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_POLL_S, _REMIND_S = 0.05, 2.0
_ATTEMPTS = 3
"""Times to read an entry that is replaced meanwhile."""


@dataclass(frozen=True)
class Entry:
    """A checked entry.

    Attributes:
        digest: its name in the store.
        directory: where its files are.
        files: SHA-256 by file name.
        pin: SHA-256 of its SHA256SUMS, hence of everything in it.
        nbytes: bytes of all files.
    """

    digest: str
    directory: Path
    files: dict[str, str]
    pin: str
    nbytes: int

    def read(self, name: str) -> bytes:
        """A file's bytes, as they were checked.

        Raises:
            DamagedEntryError: the file was changed after the check.
        """
        try:
            data = (self.directory / name).read_bytes()
        except OSError as error:
            raise DamagedEntryError(f"{self.directory / name} was removed: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.files.get(name):
            raise DamagedEntryError(f"{self.directory / name} changed while it was read")
        return data


class EntryStore:
    """A cache directory.

    Args:
        root: where it is; created when something is first written.
    """

    def __init__(self, root: Path):
        self.root = root

    @property
    def _entries(self) -> Path:
        return self.root / "entries"

    def directory(self, digest: str) -> Path:
        """Where an entry of this name is, if there is one."""
        return self._entries / digest

    def digests(self) -> list[str]:
        """Names of all entries, checked or not."""
        try:
            paths = list(self._entries.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        return sorted(p.name for p in paths if _DIGEST.fullmatch(p.name))

    def prepare(self) -> None:
        """Create the folders, before long work whose result is to be written.

        Raises:
            CacheWriteError: the cache cannot be written.
            CacheError: another user could have written it.
        """
        with self._writing():
            for name in ("entries", "locks", "tmp"):
                self._make(name)
                if not os.access(self.root / name, os.W_OK):
                    raise PermissionError(f"no permission to write {self.root / name}")

    def read(self, digest: str) -> Entry | None:
        """An entry with every file compared with its SHA-256; None where there is no such entry.

        Raises:
            DamagedEntryError: files are missing, unknown or altered; the message names them.
            CacheError: another user could have written the cache, or a file in it; or this user
                may not read it.
        """
        directory = self._entries / digest
        for attempt in range(_ATTEMPTS):
            before = self._inode(directory)
            if before is None:
                return None
            try:
                return self._read(digest)
            except FileNotFoundError:
                continue  # It was replaced or removed while it was read.
            except (IsADirectoryError, NotADirectoryError) as error:
                raise DamagedEntryError(f"{directory}: {error}") from error
            except PermissionError as error:
                raise self._unreadable(error) from error
            except DamagedEntryError:
                after = self._inode(directory)
                if after == before or (after is not None and attempt == _ATTEMPTS - 1):
                    raise
        return None

    def _inode(self, directory: Path) -> int | None:
        """What tells an entry from one that took its place; None where there is none."""
        try:
            return directory.lstat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> CacheError:
        return CacheError(f"cannot read the graph cache: {error}; chmod -R a+rX {self.root}")

    def _read(self, digest: str) -> Entry | None:
        directory = self._entries / digest
        for path in (self.root, self._entries, directory):
            check_owner(path)
        paths = sorted(directory.iterdir())
        for path in paths:
            check_owner(path)
        sums_path = directory / SUMS
        if sums_path not in paths:
            raise DamagedEntryError(f"{directory} has no {SUMS}")
        sums = sums_path.read_bytes()
        files = _parse_sums(sums_path, sums)
        _compare(directory, files, {path.name for path in paths} - {SUMS})
        nbytes = sum(path.stat().st_size for path in paths)
        return Entry(digest, directory, files, hashlib.sha256(sums).hexdigest(), nbytes)

    @contextmanager
    def lock(self, digest: str, tell: Callable[[str], None]) -> Iterator[None]:
        """Hold an entry's lock; the system releases it however the process ends.

        Args:
            digest: the entry.
            tell: hears every two seconds that another process is building it.

        Raises:
            CacheWriteError: the cache is not writable, or its file system has no locks.
            CacheError: another user could have written it.
        """
        with self._writing():
            self._make("locks")
            handle = os.open(self.root / "locks" / digest, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            self._acquire(handle, tell)
            yield
        finally:
            os.close(handle)

    def _acquire(self, handle: int, tell: Callable[[str], None]) -> None:
        """Wait for an exclusive lock, saying so from time to time."""
        told = time.monotonic() - _REMIND_S
        while not self._take(handle):
            if time.monotonic() - told >= _REMIND_S:
                told = time.monotonic()
                tell("waiting for another process that builds this entry")
            time.sleep(_POLL_S)

    def _take(self, handle: int) -> bool:
        """Lock a file unless it is locked."""
        with self._writing():  # A file system without locks says so here.
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if os.fstat(handle).st_uid == os.geteuid():
                os.fchmod(handle, FILE_MODE)  # Whatever the umask.
        return True

    def write(self, digest: str, fill: Callable[[Path], None]) -> Entry:
        """Write an entry, in place of what is there; call it under the entry's lock.

        Args:
            digest: the entry.
            fill: puts its files into the empty directory it is given.

        Raises:
            CacheWriteError: the disk is full or the cache is not writable; nothing is left behind.
            CacheError: another user could have written it.
        """
        with self._writing():
            for name in ("entries", "tmp"):
                self._make(name)
            # Only the lock's holder writes this entry, so what lies here is a killed builder's.
            for leftover in (self.root / "tmp").glob(f"{digest}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f"{digest}-", dir=self.root / "tmp"))
            try:
                fill(scratch)
                _seal(scratch)
                self._install(scratch, digest)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        entry = self.read(digest)
        if entry is None:
            raise CacheError(f"{self._entries / digest} was removed as soon as it was written")
        return entry

    def remove(self, digest: str) -> None:
        """Delete an entry; by a rename first, so that nobody sees half of it."""
        with self._writing():
            shutil.rmtree(self._put_aside(digest), ignore_errors=True)

    def _put_aside(self, digest: str) -> Path:
        """Move an entry to `tmp`, under its own name: its next builder clears what is left."""
        self._make("tmp")
        trash = Path(tempfile.mkdtemp(prefix=f"{digest}-trash-", dir=self.root / "tmp"))
        try:
            os.rename(self._entries / digest, trash / digest)
        except OSError:
            trash.rmdir()
            raise
        return trash

    def leftovers(self) -> list[Path]:
        """What killed builders left in `tmp`; entries under construction are not listed."""
        if not (self.root / "tmp").is_dir():
            return []
        return [path for path in sorted((self.root / "tmp").iterdir()) if not self._is_locked(path)]

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
        os.rename(scratch, target)
        _sync(self._entries)
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)

    def _make(self, name: str) -> None:
        """A folder of the store, and the store itself, writable by nobody else."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, self.root / name):
            if not path.exists():
                path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                path.chmod(DIRECTORY_MODE)  # Whatever the umask.
            check_owner(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheWriteError(
                f"cannot write the graph cache {self.root}: {error}; free space or make it "
                "writable, or choose another with cache_dir (MTPC_CACHE_DIR)"
            ) from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _render_sums(files: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode()


def _parse_sums(path: Path, data: bytes) -> dict[str, str]:
    """Strictly what `_render_sums` writes: any other spelling is damage."""
    matches = [_LINE.fullmatch(line) for line in data.decode("latin-1").splitlines()]
    files = {match[2]: match[1] for match in matches if match}
    if _render_sums(files) != data:
        raise DamagedEntryError(f"{path} is not a list of SHA-256 sums as mtpc writes it")
    return files


def _compare(directory: Path, files: dict[str, str], found: set[str]) -> None:
    faults = [f"{name} is missing" for name in sorted(files.keys() - found)]
    faults += [f"{name} is not in {SUMS}" for name in sorted(found - files.keys())]
    for name in sorted(files.keys() & found):
        if file_digest(directory / name) != files[name]:
            faults.append(f"{name} does not have the SHA-256 in {SUMS}")
    if faults:
        raise DamagedEntryError(f"{directory}: {'; '.join(faults)}")


def _seal(directory: Path) -> None:
    """Checksums, modes, and everything on the disk before its name is."""
    files = {path.name: file_digest(path) for path in directory.iterdir()}
    (directory / SUMS).write_bytes(_render_sums(files))
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
