"""Refusing cache files that another user could have written, because they are run as code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mtpc.errors import CacheError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
"""Other users may read, because root may build an image that another user serves from."""


def check_owner(path: Path) -> None:
    """Refuse a file or directory that another user could have written.

    It accepts plain files and directories that belong to the user of this process or to root, and
    that neither their group nor others may write. It refuses symbolic links, because they lead out
    of the directories that were checked.

    Raises:
        CacheError: the path is refused; the message says what to change.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"{path} is a symbolic link, which could lead to another user's code; replace it by "
            "what it points to, or give the real directory as the cache"
        )
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CacheError(f"{path} is neither a file nor a directory; remove it from the cache")
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}: "
            f"loading it would run that user's code; chown it to user {os.geteuid()}, or use a "
            "cache directory of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"{path} can be written by its group or by others (mode {status.st_mode & 0o777:o}): "
            f"loading it could run their code; chmod go-w {path}, after you check its contents"
        )
