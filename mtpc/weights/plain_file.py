"""Files in directories that users name: anything may have a file's name, and the disk be full."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from io import BufferedReader
from pathlib import Path

from mtpc.errors import RequestError


def open_plain(path: Path, follow_links: bool = True) -> BufferedReader:
    """A file to read. A pipe or a device is refused, and never waited for.

    Raises:
        OSError: there is no such file, it is not a plain file, or it is a link and `follow_links`
            is not set.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_status(path: Path) -> str:
    """What changes whenever the content of a file does.

    Raises:
        OSError: there is no such file.
    """
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return " ".join(map(str, (status.st_dev, status.st_ino, status.st_size, *times)))


def read_text(path: Path, most: int = -1) -> str:
    """The first `most` characters of a text that a user names; -1 is all.

    Raises:
        RequestError: it cannot be read, or is not in UTF-8.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}; expected a text in UTF-8") from None


def write_output(path: Path, data: bytes) -> None:
    """Write the file that a user names: whole, or not at all. A pipe or a device is written to.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        replace(path.resolve(), data)


def replace(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, in place of whatever has its name, such as a link.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    scratch = path.with_name(f".mtpc-{secrets.token_hex(4)}")
    try:
        with scratch.open("xb") as file:
            file.write(data)
        scratch.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        scratch.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a directory; the system releases it when that ends.

    Raises:
        OSError: it is no directory, or the file system has no locks.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
