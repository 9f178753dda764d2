"""GGUF files, llama.cpp's format, read as checkpoints by the names that transformers has.

This module finds the files of a path; nothing else of the package is needed where there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mtpc.errors import CheckpointError

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHERS = "mmproj"
"""Files of vision encoders begin so; mtpc does not run them."""


def models_of(files: Iterable[str]) -> dict[str, str]:
    """Names of the models in GGUF files, without the suffix, and the first file of each. Paths are
    separated by "/"; other files than those of models are left out."""
    found: dict[str, str] = {}
    for file in sorted(files):
        if file.endswith(SUFFIX) and not file.rpartition("/")[2].startswith(_OTHERS):
            match = _SPLIT.fullmatch(file)
            found.setdefault(match["stem"] if match else file.removesuffix(SUFFIX), file)
    return found


def part_names(file: str) -> list[str]:
    """Names of all parts of a split file, one of which is given; itself, if it is not split."""
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [file]
    count = int(match["count"])
    return [f"{match['stem']}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]


def find_gguf(source: Path) -> list[Path]:
    """The GGUF files of a checkpoint, in order: a file, all parts of a split one, or those of a
    directory; [] if the source is none of these.

    Raises:
        CheckpointError: a directory holds several models, or a part of a split one is missing.
    """
    if source.is_file() and source.suffix == SUFFIX:
        return _all_parts(source)
    if not source.is_dir():
        return []
    models = models_of(path.name for path in source.glob(f"*{SUFFIX}"))
    if len(models) > 1:
        raise CheckpointError(
            f"{source} holds {len(models)} GGUF models: {', '.join(models.values())}; expected "
            "one: give the path of the file"
        )
    return [part for file in models.values() for part in _all_parts(source / file)]


def _all_parts(path: Path) -> list[Path]:
    parts = [path.parent / name for name in part_names(path.name)]
    if path not in parts:
        raise CheckpointError(f"{path} is no part of {len(parts)}; expected numbers from 1 on")
    for part in parts:
        if not part.is_file():
            raise CheckpointError(
                f"{part} is missing, a part of {path.name}; expected {len(parts)} files in one "
                "directory: copy or download it again"
            )
    return parts
