"""The SHA-256 of weight files, cached by device, inode, size and times of each file.

Reading a file of 16 GB takes half a minute. One of the times is that of the inode's last change,
which no program can set back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mtpc.weights.plain_file import file_digest, file_status, open_plain, replace


def content_digest(paths: Iterable[Path], memory: Path) -> str:
    """One digest of the contents of files, whatever their names. The file `memory` keeps their
    digests; it need not exist, and need not be writable.

    Raises:
        OSError: a file cannot be read.
    """
    known = _read(memory)
    found = {file_status(path): path for path in paths}
    digests = {status: known.get(status) or file_digest(path) for status, path in found.items()}
    if not digests.keys() <= known.keys():
        # If two processes write, one result is lost, and a later process reads those files again.
        with suppress(OSError):
            replace(memory, json.dumps(known | digests).encode())
    return hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()


def _read(memory: Path) -> dict[str, str]:
    """The known digests; none if the file is missing or damaged."""
    with suppress(OSError, ValueError), open_plain(memory) as file:
        value = json.loads(file.read())
        if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return value
    return {}
