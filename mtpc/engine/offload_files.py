"""A directory of files that several processes share: whole files only, bounded in bytes.

A file is written under another name and then renamed, so that no process finds a part of it.
Nothing is flushed to the disk, so a reader must notice damage by a loss of power. The file
`.mtpc-lock` holds the number of bytes in use. A process holds its lock while it counts or removes
files. What is no plain file is left alone, whatever its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mtpc.errors import OptionError
from mtpc.weights.plain_file import open_plain

_LOCK = ".mtpc-lock"
_NAME = re.compile(r"[0-9a-f]{64}\.(page|state)\.safetensors(\..*\.tmp)?")
"""Names of the files, finished or being written. The directory's other files are left alone."""
_ABANDONED_S = 60.0
"""If no process has written to a temporary file for so many seconds, its process was killed."""
_KEPT = 0.9
"""If files must be removed, they are removed down to this share of the bytes, because listing them
takes time."""
_DIGITS = 24
_PATIENCE_S, _POLL_S = 1.0, 0.002


class OffloadDirectory:
    """The files of one directory.

    Args:
        path: the directory, which is created if it is missing.
        max_bytes: the most bytes of all files, including those of other processes.

    Attributes:
        nbytes: bytes of all files when this process last wrote one.
        num_evicted: files that this process removed because new ones needed their bytes.

    Raises:
        OptionError: another user can write the directory, or this one cannot.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self.nbytes = self.num_evicted = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid not in (os.geteuid(), 0) or mode & 0o022:
                raise OptionError(
                    f"kv_offload_dir is {path}, which others can write (user {status.st_uid}, mode "
                    f"{mode:o}) and so change texts; expected a directory of your own: chmod go-w"
                )
            with self._locked() as handle:
                self._make_room(handle, 0)
        except OSError as error:
            raise OptionError(
                f"kv_offload_dir is {path}, which cannot be used: {error}; expected a directory "
                "that this user may write, on a file system with locks"
            ) from error

    def touch(self, name: str, used: int | None = None) -> bool:
        """Whether there is a file of this name. It then counts as used: now, or at `used`, in
        nanoseconds since the epoch."""
        when = time.time_ns() if used is None else used
        try:
            os.utime(self.path / name, ns=(when, when), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, into: Sequence[memoryview]) -> bool:
        """Fill buffers with a file, one after the other. Return whether it has exactly their bytes.

        The file is read, not mapped: a process that has mapped a file ends if another one shortens
        the file.

        Raises:
            OSError: the file cannot be read; FileNotFoundError if there is none.
        """
        with open_plain(self.path / name, follow_links=False) as file:
            counts = [file.readinto(part) for part in into]
            return counts == [part.nbytes for part in into] and not file.read(1)

    def write(self, name: str, parts: Sequence[memoryview | bytes]) -> None:
        """Write a file. If there are too many bytes, first remove the least recently used files.

        Raises:
            OSError: the disk is full, or the directory cannot be written. No part of the file
                stays.
        """
        nbytes = sum(memoryview(part).nbytes for part in parts)
        with self._locked() as handle:  # The bytes count before they are written.
            text = os.pread(handle, _DIGITS, 0).decode("latin-1").strip()
            self.nbytes = int(text) if re.fullmatch("[0-9]+", text) else self.max_bytes
            if self.nbytes + nbytes > self.max_bytes:
                self._make_room(handle, nbytes)
            self._note(handle, self.nbytes + nbytes)
        handle, temporary = tempfile.mkstemp(".tmp", f"{name}.", self.path)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for part in parts:
                    data = memoryview(part)
                    while data:  # A system call may write fewer bytes.
                        data = data[os.write(file.fileno(), data) :]
            os.replace(temporary, self.path / name)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def remove(self, name: str) -> None:
        """Remove a file, if that is possible."""
        with suppress(OSError):
            os.unlink(self.path / name)

    def _make_room(self, handle: int, nbytes: int) -> None:
        """Count all files again. Remove the oldest if there is no room for `nbytes` more bytes."""
        found = sorted(self._files())
        self.nbytes = sum(size for _, size, _ in found)
        if self.nbytes + nbytes > self.max_bytes:
            target = max(int(_KEPT * self.max_bytes) - nbytes, 0)
            for _, size, path in found:
                if self.nbytes <= target:
                    break
                path.unlink(missing_ok=True)
                self.nbytes -= size
                self.num_evicted += 1
        self._note(handle, self.nbytes)

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When each file was used, its bytes and its path. Removes what killed processes left."""
        for entry in os.scandir(self.path):
            if not _NAME.fullmatch(entry.name):
                continue
            with suppress(FileNotFoundError):  # Another process has removed it.
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(".tmp") and time.time() - status.st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
                    continue
                yield status.st_mtime_ns, status.st_size, Path(entry.path)

    def _note(self, handle: int, nbytes: int) -> None:
        os.pwrite(handle, f"{nbytes:<{_DIGITS}}".encode(), 0)
        self.nbytes = nbytes

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the directory's lock. The system releases it, however the process ends. Raises
        OSError: the file of that name was not made here."""
        place, flags = self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(place, flags, 0o600)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.EINVAL, "not a plain file of one name", str(place))
            _lock(handle)
            yield handle
        finally:
            os.close(handle)


def _lock(handle: int) -> None:
    """Lock a file. The wait is short, because the process that holds the lock may be stopped.
    Raises OSError: another process holds the lock, or the file system has none."""
    for _ in range(int(_PATIENCE_S / _POLL_S)):
        with suppress(BlockingIOError):
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_POLL_S)
    return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
