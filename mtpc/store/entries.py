"""Entries on disk: written completely or not at all, and checked by SHA-256 before use.

    ROOT/entries/DIGEST/   an entry: its files, and SHA256SUMS over all of them
    ROOT/locks/DIGEST      lock file, held while an entry is built
    ROOT/tmp/              entries that are being written

`SHA256SUMS` has the format of the tool `sha256sum`, so `sha256sum -c SHA256SUMS` checks an entry
without mtpc. The store does not know what the files mean.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.store.safety import DIRECTORY_MODE, FILE_MODE, check_owner
from mtpc.store.scratch import is_old, remove_abandoned
from mtpc.weights.content import file_digest

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_POLL_S, _REMIND_S = 0.05, 2.0
_ATTEMPTS = 3
"""How often to read an entry again that is replaced while it is read."""


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

    def __str__(self) -> str:
        """Its place, for messages."""
        return str(self.directory)

    def read(self, name: str) -> bytes:
        """The bytes of a file, checked again.

        Raises:
            DamagedEntryError: the file was changed or removed after the first check.
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
        root: its path; the first write creates it.
    """

    def __init__(self, root: Path):
        self.root = root

    @property
    def _entries(self) -> Path:
        return self.root / "entries"

    def directory(self, digest: str) -> Path:
        """Directory of the entry with this name, whether it exists or not."""
        return self._entries / digest

    def digests(self) -> list[str]:
        """Names of all entries, without checks.

        Raises:
            CacheError: this user may not read the cache.
        """
        return [p.name for p in self._listed("entries", lambda p: _DIGEST.fullmatch(p.name))]

    def _listed(self, name: str, wanted: Callable[[Path], object]) -> list[Path]:
        """The wanted paths in a folder of the store, sorted; none if the folder does not exist."""
        try:
            return [path for path in sorted((self.root / name).iterdir()) if wanted(path)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unreadable(error) from error

    def prepare(self) -> None:
        """Create the folders; to be called before long work whose result will be written.

        Temporary directories of killed processes are removed.

        Raises:
            CacheWriteError: the cache cannot be written.
            CacheError: another user could have written the cache.
        """
        remove_abandoned()
        with self._writing():
            for name in ("entries", "locks", "tmp"):
                self._make(name)
                if not os.access(self.root / name, os.W_OK):
                    raise PermissionError(f"no permission to write {self.root / name}")
        for path in self.leftovers():
            if is_old(path):
                shutil.rmtree(path, ignore_errors=True)

    def read(self, digest: str) -> Entry | None:
        """An entry, after a check of all its files; None if there is no such entry.

        Raises:
            DamagedEntryError: files are missing, unknown or changed; the message names them.
            CacheError: another user could have written the cache or a file in it; or this user may
                not read it.
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
            except OSError as error:
                raise self._unreadable(error) from error
            except DamagedEntryError:
                after = self._inode(directory)
                if after == before or (after is not None and attempt == _ATTEMPTS - 1):
                    raise
        return None

    def _inode(self, directory: Path) -> int | None:
        """Inode of an entry, which changes when the entry is replaced; None if it is missing."""
        try:
            return directory.lstat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> CacheError:
        advice = "choose another directory with cache_dir (MTPC_CACHE_DIR)"
        if isinstance(error, PermissionError):
            advice = f"chmod -R a+rX {self.root}"
        return CacheError(f"cannot read the graph cache {self.root}: {error}; {advice}")

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
        """Hold the lock of an entry. The system releases it when the process ends in any way.

        Args:
            digest: name of the entry.
            tell: is called every two seconds while another process holds the lock.

        Raises:
            CacheWriteError: the cache is not writable, or its file system has no locks.
            CacheError: another user could have written the cache.
        """
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
        """Write an entry, and replace the old one if there is one. The caller holds its lock.

        Args:
            digest: name of the entry.
            fill: writes its files into the empty directory that it is given.

        Raises:
            CacheWriteError: the disk is full or the cache is not writable; no file is left behind.
            CacheError: another user could have written the cache.
        """
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
        entry = self.read(digest)
        if entry is None:
            raise CacheError(
                f"{self._entries / digest} was removed right after it was written; start again"
            )
        return entry

    def remove(self, digest: str) -> None:
        """Delete an entry. It is renamed first, so that no reader finds a part of it."""
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
        """Directories in `tmp` that killed processes left; entries being written are left out.

        Raises:
            CacheError: this user may not read the cache.
        """
        return self._listed("tmp", lambda path: not self._is_locked(path))

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


def _render_sums(files: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode()


def _parse_sums(path: Path, data: bytes) -> dict[str, str]:
    """Parse exactly what `_render_sums` writes; any other text is damage."""
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
    """Write the checksums, set the modes, and flush everything to disk."""
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
