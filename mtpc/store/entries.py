"""Entries on disk: written completely or not at all, and checked by SHA-256 before use.

    ROOT/entries/DIGEST/   an entry: its files, and SHA256SUMS over all of them
    ROOT/locks/DIGEST      lock file, held while an entry is built
    ROOT/tmp/              entries that are being written

`SHA256SUMS` has the format of the tool `sha256sum`, so `sha256sum -c SHA256SUMS` checks an entry
without mtpc. The store does not know what the files mean.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpc.errors import CacheError, DamagedEntryError
from mtpc.store.safety import check_owner
from mtpc.weights.plain_file import file_digest

if TYPE_CHECKING:
    from mtpc.store.writing import StoreWriter

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)")
_DIGEST = re.compile(r"[0-9a-f]{32}")
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
        frozen: whether its users build nothing that it lacks.
    """

    def __init__(self, root: Path, frozen: bool = False):
        self.root, self.frozen = root, frozen

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
        return [p.name for p in self.listed("entries", lambda p: _DIGEST.fullmatch(p.name))]

    def listed(self, name: str, wanted: Callable[[Path], object]) -> list[Path]:
        """The wanted paths in a folder of the store, sorted; none if the folder does not exist."""
        try:
            return [path for path in sorted((self.root / name).iterdir()) if wanted(path)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unreadable(error) from error

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
        files = parse_sums(sums_path, sums)
        _compare(directory, files, {path.name for path in paths} - {SUMS})
        nbytes = sum(path.stat().st_size for path in paths)
        return Entry(digest, directory, files, hashlib.sha256(sums).hexdigest(), nbytes)

    @property
    def _writer(self) -> StoreWriter:
        from mtpc.store.writing import StoreWriter  # Not above: a warm start writes nothing.

        return StoreWriter(self)

    def prepare(self) -> None:
        """Create the folders; to be called before long work whose result will be written.

        Temporary directories of killed processes are removed.

        Raises:
            CacheWriteError: the cache cannot be written.
            CacheError: another user could have written the cache.
        """
        self._writer.prepare()

    def lock(self, digest: str, tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the lock of an entry. The system releases it when the process ends in any way.

        Args:
            digest: name of the entry.
            tell: is called every two seconds while another process holds the lock.

        Raises:
            CacheWriteError: the cache is not writable, or its file system has no locks.
            CacheError: another user could have written the cache.
        """
        return self._writer.lock(digest, tell)

    def write(self, digest: str, fill: Callable[[Path], None]) -> Entry:
        """Write an entry, and replace the old one if there is one. The caller holds its lock.

        Args:
            digest: name of the entry.
            fill: writes its files into the empty directory that it is given.

        Raises:
            CacheWriteError: the disk is full or the cache is not writable; no file is left behind.
            CacheError: another user could have written the cache.
        """
        return self._writer.write(digest, fill)

    def remove(self, digest: str) -> None:
        """Delete an entry. It is renamed first, so that no reader finds a part of it."""
        self._writer.remove(digest)

    def leftovers(self) -> list[Path]:
        """Directories in `tmp` that killed processes left; entries being written are left out.

        Raises:
            CacheError: this user may not read the cache.
        """
        return self._writer.leftovers()


def render_sums(files: dict[str, str]) -> bytes:
    """The contents of the file `SUMS`, of SHA-256 by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode()


def parse_sums(path: Path, data: bytes) -> dict[str, str]:
    """Parse exactly what `render_sums` writes; any other text is damage."""
    matches = [_LINE.fullmatch(line) for line in data.decode("latin-1").splitlines()]
    files = {match[2]: match[1] for match in matches if match}
    if render_sums(files) != data:
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
