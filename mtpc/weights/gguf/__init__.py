"""GGUF files, llama.cpp's format, read as checkpoints by the names that transformers has.

This module finds the files of a path; nothing else of the package is needed where there are none.
"""

from __future__ import annotations

import re
from pathlib import Path

from mtpc.errors import CheckpointError

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHERS = "mmproj"
"""Files of vision encoders begin so; mtpc does not run them."""


def find_gguf(source: Path) -> list[Path]:
    """The GGUF files of a checkpoint: a file, all parts of a split one, or those of a directory.

    Args:
        source: path of a file, or of a directory.

    Returns:
        The files in order; [] if the source is none of these.

    Raises:
        CheckpointError: a directory holds several models, or a part of a split one is missing.
    """
    if source.is_file() and source.suffix == SUFFIX:
        return _all_parts(source)
    if not source.is_dir():
        return []
    found = [p for p in sorted(source.glob(f"*{SUFFIX}")) if not p.name.startswith(_OTHERS)]
    first = [p for p in found if (match := _SPLIT.fullmatch(p.name)) is None
             or int(match["number"]) == 1]  # fmt: skip
    if len(first) > 1:
        names = ", ".join(path.name for path in first)
        raise CheckpointError(
            f"{source} holds {len(first)} GGUF models: {names}; expected one: give the path of the "
            "file"
        )
    return _all_parts((first or found)[0]) if found else []


def _all_parts(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = (f"{match['stem']}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count))
    parts = [path.parent / name for name in names]
    if path not in parts:
        raise CheckpointError(f"{path} is no part of {count}; expected numbers from 1 on")
    for part in parts:
        if not part.is_file():
            raise CheckpointError(
                f"{part} is missing, a part of {path.name}; expected {count} files in one "
                "directory: copy or download it again"
            )
    return parts
