"""Opening files in directories that users name, where anything may have a file's name."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from io import BufferedReader
from pathlib import Path


def open_plain(path: Path, follow_links: bool = True) -> BufferedReader:
    """A file to read. A pipe or a device is refused, and never waited for.

    Raises:
        OSError: there is no such file, it is not a plain file, or it is a link and `follow_links`
            is not set.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; what has its name, also a link, is replaced.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:99]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
