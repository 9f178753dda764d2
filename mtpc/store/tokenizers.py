"""Tokenizers as the cache keeps them, in the format of tokenizer.json.

Making one of a checkpoint's files takes transformers, whose import alone takes a second, and of a
GGUF file a second more. What it made is loaded in a third of that.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mtpc.errors import CacheWriteError, DamagedEntryError
from mtpc.layout.progress import silent
from mtpc.store.entries import EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import find, keep
from mtpc.weights.plain_file import file_status

KIND = "tokenizer"
_NAME, _LIBRARIES = "tokenizer.json", ("tokenizers", "transformers")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files from which transformers takes more than the tokenizer's own file says."""


@dataclass(frozen=True)
class KeptTokenizers:
    """The tokenizers of a cache.

    Attributes:
        store: the cache.
        is_frozen: whether nothing is written.
    """

    store: EntryStore
    is_frozen: bool = False

    def read(self, place: Path) -> bytes | None:
        """The tokenizer of a file, as it was kept; None if it is not here, or is damaged.

        Args:
            place: a tokenizer.json, or a GGUF file.

        Raises:
            CacheError: another user could have written the cache.
        """
        with suppress(DamagedEntryError):
            entry = find(self.store, _fields(place))
            return None if entry is None else entry.read(_NAME)
        return None

    def write(self, place: Path, made: bytes) -> None:
        """Keep the tokenizer of a file, if the cache can be written."""
        if self.is_frozen:
            return
        fields = _fields(place)
        with suppress(CacheWriteError):
            self.store.prepare()
            with self.store.lock(digest(fields), silent):
                keep(self.store, fields, {_NAME: _brief(made)})


def _brief(made: bytes) -> bytes:
    """The same tokenizer, each of whose merges is one text: two take twice the memory to load."""
    from tokenizers import Tokenizer  # Not above: few starts make a tokenizer.

    says = json.loads(made)
    merges = says["model"].get("merges") or ["none"]
    if any(isinstance(merge, str) or " " in "".join(merge) for merge in merges):
        return made
    says["model"]["merges"] = [" ".join(merge) for merge in merges]
    brief = json.dumps(says, ensure_ascii=False)
    is_same = Tokenizer.from_str(brief).to_str().encode() == made
    return brief.encode() if is_same else made


def _fields(place: Path) -> Fields:
    """The key: what the files were when the tokenizer was made, and which libraries made it."""
    files = [place, *(path for name in _BESIDE if (path := place.parent / name).is_file())]
    of_files = {f"tokenizer.{path.name}": file_status(path) for path in files}
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return {"kind": KIND, **of_files, **versions}
