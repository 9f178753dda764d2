"""Who could have written a file that is about to be opened as code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mtpc.errors import CacheError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
"""Others may read: an image is built by root and served by another user."""


def check_owner(path: Path) -> None:
    """Refuse a file or directory that somebody else could have written.

    Accepted are plain files and directories of this process's user, or of root, that neither
    group nor others may write. Symbolic links are refused: they lead out of what was checked.

    Raises:
        CacheError: the message says what to change.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"{path} is a symbolic link, which could lead to code of another user; "
            "replace it by what it points to, or name the real directory as the cache"
        )
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CacheError(f"{path} is neither a file nor a directory; remove it from the cache")
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}: "
            "loading it would run that user's code; "
            f"chown it to user {os.geteuid()}, or use a cache directory of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"{path} can be written by its group or by others (mode {status.st_mode & 0o777:o}): "
            f"loading it could run their code; chmod go-w {path}, after making sure of its contents"
        )
