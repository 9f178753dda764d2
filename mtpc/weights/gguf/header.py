"""The header of a GGUF file: metadata, and where each tensor lies. Nothing else is read.

The `gguf` package reads the same. It takes 8 seconds for a vocabulary of 150,000 tokens, and loops
over any count that a file states. This module skips a vocabulary, and checks each count before it
loops over it: against the bytes that are left, and against a limit, because a sparse file may
announce terabytes.

Source: ggml/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mtpc.errors import CheckpointError
from mtpc.weights.gguf.blocks import BLOCKS, Block
from mtpc.weights.tensor_file import Span, StoredTensor

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
MOST_TENSORS = 2**18
_MOST_ENTRIES = 1024
_MOST_VALUES = 2**21
"""The most tensors, entries of metadata, and values of all arrays together. No released model has
two thirds of one of these."""
TEMPLATE, _TEMPLATE_BYTES = "tokenizer.chat_template", 2**20
_KEPT, _KEPT_BYTES = 1024, 4096
"""The most values of an array, and bytes of a text, that are read; others are skipped."""


@dataclass(frozen=True)
class StoredBlocks(StoredTensor):
    """A tensor of a GGUF file.

    Attributes, in addition to those of `StoredTensor`:
        block: its type in the file; `dtype` is the type's name.
    """

    block: Block

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.block.inputs * self.block.nbytes

    @property
    def pieces(self) -> list[Span]:
        return [self.span]


@dataclass(frozen=True)
class Skipped:
    """A value of metadata that is not read: an array of texts, or one that is too long. Of texts,
    `begin` is the offset in the file of the first, and `count` their number."""

    what: str
    begin: int = 0
    count: int = 0

    def __repr__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        metadata: values by key: a number, a text, a list of numbers, or what is `Skipped`.
        tensors: by name.
        entries: where in the file the entry of each key is, [begin, end).
        alignment: tensors begin at multiples of so many bytes.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredBlocks]
    entries: Mapping[str, tuple[int, int]]
    alignment: int


class _Cursor:
    """Reads a file from front to back, never past its end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self.path, self.place = data, path, 0
        self.size, self._values = len(data), 0

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
        """A text that has few bytes: a name."""
        found = self._text(what)
        if isinstance(found, Skipped):
            raise self.error(f"{what} is {found}; expected at most {_KEPT_BYTES} bytes")
        return found

    def _text(self, what: str) -> str | Skipped:
        length = self.take("Q", what)
        start = self.place
        self.skip(length, what)
        if length > (_TEMPLATE_BYTES if what == TEMPLATE else _KEPT_BYTES):
            return Skipped(f"a text of {length} bytes")
        try:
            return self._data[start : self.place].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8: {error.reason}") from None

    def count(self, what: str, least: int, most: int) -> int:
        """A count of at most `most` things that each take at least `least` bytes."""
        count = int(self.take("Q", what))
        if count * least > self.left:
            raise self.error(f"it announces {count} {what}, and {self.left} bytes are left")
        if count > most:
            raise self.error(f"it announces {count} {what}; expected at most {most}")
        return count

    def value(self, kind: int, what: str) -> Any:
        """A value of metadata, of type `kind`."""
        if kind == _TEXT:
            return self._text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _FORMATS:
            raise self.error(f"{what} has the type {kind}; expected one of 0 to 12")
        number = self.take(_FORMATS[kind], what)
        return shortest(number) if kind == _FLOAT else number

    def _array(self, what: str) -> Any:
        kind = self.take("I", what)
        if kind != _TEXT and kind not in _FORMATS:
            raise self.error(f"{what} is an array of the type {kind}; expected numbers or texts")
        width = 8 if kind == _TEXT else struct.calcsize("<" + _FORMATS[kind])
        count = self.count(f"values of {what}", width, _MOST_VALUES - self._values)
        self._values += count
        if kind == _TEXT:
            begin = place = self.place
            last, length = self.size - 8, struct.Struct("<Q").unpack_from
            for _ in range(count):
                place += 8 + (length(self._data, place)[0] if place <= last else 0)
            self.skip(place - self.place, what)
            return Skipped(f"an array of {count} texts", begin, count)
        if count > _KEPT:
            self.skip(count * width, what)
            return Skipped(f"an array of {count} numbers")
        found = self.take(f"{count}{_FORMATS[kind]}", what) if count else ()
        row = list(found) if isinstance(found, tuple) else [found]
        return [shortest(number) for number in row] if kind == _FLOAT else row


def shortest(number: float) -> float:
    """The shortest decimal number that float32 rounds to this one: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(number)))


def read_header(data: mmap.mmap, path: Path) -> Header:
    """The header of a GGUF file.

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
    num_tensors = cursor.count("tensors", _SHORTEST_TENSOR, MOST_TENSORS)
    metadata: dict[str, Any] = {}
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(cursor.count("entries of metadata", 8 + 4 + 1, _MOST_ENTRIES)):
        first = cursor.place
        key = cursor.text("a key")
        if key in metadata:
            raise cursor.error(f"its metadata have {key!r} twice")
        kind = cursor.take("I", f"the type of {key}")
        metadata[key] = cursor.value(kind, key)
        entries[key] = (first, cursor.place)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or not 0 < alignment < 2**20 or alignment & (alignment - 1):
        raise cursor.error(f"{_ALIGNMENT} is {alignment!r}; expected a small power of two")
    begin = -(-cursor.place // alignment) * alignment
    tensors = _placed(cursor, found, begin, alignment)
    return Header(path, metadata, tensors, entries, alignment)


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
    cursor: _Cursor, found: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int
) -> dict[str, StoredBlocks]:
    """Tensors by name, all of them within the file and apart from each other."""
    tensors: dict[str, StoredBlocks] = {}
    ends: dict[int, int] = {}
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
        made = StoredBlocks(cursor.path, block.name, shape, begin + offset, block)
        end = made.begin + made.nbytes
        if end > cursor.size:
            raise cursor.error(f"{name} takes bytes {made.begin} to {end}, past the end")
        if name in tensors:
            raise cursor.error(f"{name} is there twice")
        if offset % alignment or offset in ends:
            raise cursor.error(
                f"{name} begins at byte {offset} of the data; expected a multiple of {alignment} "
                "where no other tensor is"
            )
        ends[offset] = end - begin
        tensors[name] = made
    for before, after in pairwise(sorted(ends)):
        if ends[before] > after:
            raise cursor.error(f"tensors overlap at byte {after} of the data")
    return tensors
