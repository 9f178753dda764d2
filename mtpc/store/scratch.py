"""Temporary directories of a process; those of a killed process are removed by a later one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from mtpc.weights.plain_file import is_held

_PREFIX = "mtpc-scratch-"
YOUNG_S = 60.0
"""A directory may be without its lock for less than this, right after it is made."""


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary directory with a lock, which the system releases however the process ends.

    Args:
        what: part of its name.
    """

    def __init__(self, what: str):
        super().__init__(prefix=f"{_PREFIX}{what}-", ignore_cleanup_errors=True)
        handle = os.open(self.name, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        with contextlib.suppress(OSError):  # A file system without locks.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_abandoned() -> None:
    """Remove this user's directories of that kind that no process holds, where that is possible."""
    found: list[Path] = []
    with contextlib.suppress(OSError):  # No temporary directory can be read.
        found += Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")
    for path in found:
        with contextlib.suppress(OSError):  # Another process removes it, or it is another user's.
            if path.lstat().st_uid == os.geteuid() and is_old(path) and not is_held(path):
                shutil.rmtree(path, ignore_errors=True)


def is_old(path: Path) -> bool:
    """Whether nothing was added to a directory for a while."""
    return time.time() - path.lstat().st_mtime > YOUNG_S
