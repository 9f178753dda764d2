"""The header of a GGUF file: metadata, and where each tensor lies. Nothing else is read.

The `gguf` package reads the same. It takes 8 seconds for a vocabulary of 150,000 tokens, and loops
over any count that a file states. This module skips a vocabulary, and compares each count with the
bytes that are left before it loops over it.

Source: ggml/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtpc.errors import CheckpointError
from mtpc.weights.gguf.blocks import BLOCKS, Block

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
"""Type of a value of fixed size -> its format of `struct`."""
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_MOST_DIMS = 4
_ALIGNMENT = "general.alignment"
_SHORTEST_TENSOR = 8 + 4 + 8 + 4 + 8
_LARGEST = 2**48
"""No size of a tensor is as large."""


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor of a GGUF file.

    Attributes:
        block: its type.
        shape: its sizes, outermost first.
        begin: offset of its first byte in the file.
    """

    block: Block
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        metadata: values by key; for an array of texts, its length.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredBlocks]


class _Cursor:
    """Reads a file from front to back, never past its end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self.path, self.place = data, path, 0
        self.size = len(data)

    @property
    def left(self) -> int:
        return self.size - self.place

    def error(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ({self.size} bytes) is not a complete GGUF file: {found}; copy or "
            "download it again"
        )

    def skip(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.error(
                f"{what} takes {count} bytes at byte {self.place}, and {self.left} are left"
            )
        self.place += count

    def take(self, form: str, what: str) -> Any:
        """Numbers of a format of `struct`, little-endian."""
        start = self.place
        self.skip(struct.calcsize("<" + form), what)
        found = struct.unpack_from("<" + form, self._data, start)
        return found[0] if len(found) == 1 else found

    def text(self, what: str) -> str:
        length = self.take("Q", what)
        start = self.place
        self.skip(length, what)
        try:
            return self._data[start : self.place].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8: {error.reason}") from None

    def count(self, what: str, least: int) -> int:
        """A count of things that each take at least `least` bytes."""
        count = int(self.take("Q", what))
        if count * least > self.left:
            raise self.error(f"it announces {count} {what}, and {self.left} bytes are left")
        return count

    def value(self, kind: int, what: str) -> Any:
        """A value of metadata, of type `kind`; of an array of texts, its length."""
        if kind == _TEXT:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _FORMATS:
            raise self.error(f"{what} has the type {kind}; expected one of 0 to 12")
        number = self.take(_FORMATS[kind], what)
        return _shortest(number) if kind == _FLOAT else number

    def _array(self, what: str) -> Any:
        kind = self.take("I", what)
        if kind in _FORMATS:
            count = self.count(f"values of {what}", struct.calcsize("<" + _FORMATS[kind]))
            found = self.take(f"{count}{_FORMATS[kind]}", what) if count else ()
            row = list(found) if isinstance(found, tuple) else [found]
            return [_shortest(number) for number in row] if kind == _FLOAT else row
        if kind != _TEXT:
            raise self.error(f"{what} is an array of the type {kind}; expected numbers or texts")
        count = self.count(f"texts of {what}", 8)
        for _ in range(count):
            self.skip(self.take("Q", what), what)
        return count


def _shortest(number: float) -> float:
    """The shortest decimal number that float32 rounds to this one: 1e-06, not 9.99999997e-07."""
    for digits in range(1, 10):
        short = float(f"{number:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", number):
            return short
    return number


def read_header(data: mmap.mmap, path: Path) -> Header:
    """The header of a GGUF file.

    Args:
        data: the file's bytes.
        path: of the file, for messages.

    Raises:
        CheckpointError: the file is not a GGUF file of version 2 or 3, is not complete, or has a
            tensor of a type that mtpc does not read.
    """
    cursor = _Cursor(data, path)
    if data[:4] != MAGIC:
        raise cursor.error(f"it begins with {bytes(data[:4])!r}, and GGUF files with {MAGIC!r}")
    cursor.skip(4, "the magic number")
    version = cursor.take("I", "the version")
    if version not in _VERSIONS:
        raise cursor.error(f"it has version {version}; expected 2 or 3, little-endian")
    num_tensors = cursor.count("tensors", _SHORTEST_TENSOR)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("entries of metadata", 8 + 4 + 1)):
        key = cursor.text("a key")
        kind = cursor.take("I", f"the type of {key}")
        metadata[key] = cursor.value(kind, key)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment < 2**20:
        raise cursor.error(f"{_ALIGNMENT} is {alignment!r}; expected a small power of two")
    begin = -(-cursor.place // alignment) * alignment
    return Header(path, metadata, _placed(cursor, found, begin))


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset within the data) of the next tensor."""
    name = cursor.text("the name of a tensor")
    count = cursor.take("I", f"the number of dimensions of {name}")
    if not 1 <= count <= _MOST_DIMS:
        raise cursor.error(f"{name} has {count} dimensions; expected 1 to {_MOST_DIMS}")
    sizes = [int(cursor.take("Q", f"the shape of {name}")) for _ in range(count)]
    if not all(0 < size < _LARGEST for size in sizes):
        raise cursor.error(f"{name} has the sizes {sizes}; expected positive ones")
    kind, offset = cursor.take("IQ", f"the place of {name}")
    return name, tuple(reversed(sizes)), kind, offset


def _placed(
    cursor: _Cursor, found: list[tuple[str, tuple[int, ...], int, int]], begin: int
) -> dict[str, StoredBlocks]:
    """Tensors by name, all of them within the file."""
    tensors: dict[str, StoredBlocks] = {}
    for name, shape, kind, offset in found:
        block = BLOCKS.get(kind)
        if block is None:
            known = ", ".join(block.name for block in BLOCKS.values())
            raise CheckpointError(
                f"{cursor.path}: {name} has ggml's type {kind}; expected one of {known}: convert "
                "or quantise the model to one of these"
            )
        if shape[-1] % block.inputs:
            raise cursor.error(f"{name} has rows of {shape[-1]}, no multiple of {block.inputs}")
        size = prod(shape) // block.inputs * block.nbytes
        if begin + offset + size > cursor.size:
            raise cursor.error(
                f"{name} takes bytes {begin + offset} to {begin + offset + size}, past the end"
            )
        if name in tensors:
            raise cursor.error(f"{name} is there twice")
        tensors[name] = StoredBlocks(block, shape, begin + offset)
    return tensors
