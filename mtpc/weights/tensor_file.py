"""One safetensors file: a check of its header, and its tensors in a memory map.

The map is private to this process and never written. So the memory of a tensor can be released, and
using the tensor again reads it from the file, usually from the page cache. The map of the
safetensors library cannot be released in part; the library only checks the file here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.packing import NORESERVE, TILE
from mtpc.weights.plain_file import open_plain

if TYPE_CHECKING:
    from mtpc.weights.read_ahead import ReadAhead

_PIECE_BYTES = 1 << 26
"""Bytes of a large matrix to read at a time. A head may have more than a gigabyte, and new memory
for as much takes seconds."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""By safetensors' names."""


def dtype_code(name: str) -> str:
    """safetensors' name of a dtype, given torch's name."""
    return next(code for code, dtype in DTYPES.items() if dtype == getattr(torch, name))


@dataclass(frozen=True)
class Span:
    """Bytes of a file: from `begin` on, `nbytes` of them."""

    path: Path
    begin: int
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors header describes it: with safetensors' name of the dtype, such as
    "BF16", and the offset of its first byte in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def is_floating_point(self) -> bool:
        """Whether it holds floating-point numbers, of a dtype that torch has or not."""
        return self.dtype.startswith(("F", "BF"))

    @property
    def is_narrow(self) -> bool:
        """Whether it holds floating-point numbers of fewer than 16 bits."""
        return self.dtype.startswith(("F8_", "F6_", "F4"))

    @property
    def is_wide(self) -> bool:
        """Whether it holds floating-point numbers of 16 bits or more."""
        return self.is_floating_point and not self.is_narrow

    @property
    def dtype_name(self) -> str:
        """torch's name of the dtype, or safetensors' if torch has none."""
        return str(DTYPES.get(self.dtype, self.dtype)).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of its values; of a dtype that torch lacks, their number."""
        dtype = DTYPES.get(self.dtype)
        return prod(self.shape) * (dtype.itemsize if dtype else 1)

    @property
    def span(self) -> Span:
        return Span(self.path, self.begin, self.nbytes)

    @property
    def pieces(self) -> list[Span]:
        """The spans in which it is read: those of some rows each if it is a large matrix."""
        if len(self.shape) != 2 or self.nbytes <= 2 * _PIECE_BYTES:
            return [self.span]
        row = self.nbytes // self.shape[0]
        step = row * max(TILE, _PIECE_BYTES // row // TILE * TILE)
        starts = range(0, self.nbytes, step)
        return [
            Span(self.path, self.begin + start, min(step, self.nbytes - start)) for start in starts
        ]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write a safetensors file. If it cannot be written, the error is the system's.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata or None)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from error


def map_file(path: Path) -> mmap.mmap:
    """A file in a private memory map, which is read and never written; it may exceed memory.

    Raises:
        CheckpointError: the file is empty, cannot be read, or finds no place in the address space.
    """
    try:
        with open_plain(path) as file:
            if sys.platform != "linux":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # As that, but without memory set aside for pages that nothing writes.
            flags, allowed = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=allowed)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot map {path} into memory: {error}; expected a file with tensors, and address "
            "space for all its bytes (see ulimit -v)"
        ) from None


class TensorFile:
    """The tensors of one safetensors file, by name. `ahead` reads tensors before they are asked
    for; None if nothing does.

    Raises:
        CheckpointError: the file is not a complete safetensors file, or cannot be mapped.
    """

    ahead: ReadAhead | None = None

    def __init__(self, path: Path):
        self.path = path
        try:
            open_plain(path).close()
            with safe_open(path, framework="np"):  # For torch it sets memory aside for all bytes.
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: "
                f"{error}; copy or download it again"
            ) from None
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        self._map = map_file(path)
        # A file is the header's length (8 bytes), the header (JSON), and the tensors.
        begin = 8 + int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8:begin])
        header.pop("__metadata__", None)
        self.tensors = {
            name: StoredTensor(
                self.path, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor.

        Raises:
            CheckpointError: torch does not have it.
        """
        stored = self.tensors[name]
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {name} is {stored.dtype}; expected one of {', '.join(DTYPES)}"
            )
        return dtype

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored. It is in the memory map, where using it reads the file, or in
        memory, if it was read ahead.

        Raises:
            CheckpointError: torch does not have its dtype; or the file cannot be read.
        """
        stored = self.tensors[name]
        return self._values(stored.span, self.dtype(name)).view(stored.shape)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The rows of `StoredTensor.pieces`, one piece after the other, each as `tensor` gives it.

        The memory of a piece is given back when the next one is asked for.
        """
        stored = self.tensors[name]
        for span in stored.pieces:
            yield self._values(span, self.dtype(name)).view(-1, *stored.shape[1:])
            self._release(span)

    def _values(self, span: Span, dtype: torch.dtype) -> Tensor:
        """All values of a span in a row, as numbers of a dtype."""
        count = span.nbytes // dtype.itemsize
        if count == 0:
            return torch.empty(0, dtype=dtype)
        read = self.ahead.take(span) if self.ahead else None
        memory, begin = read or (self._map, span.begin)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)

    def sample(self, name: str, nbytes: int) -> bytes:
        stored = self.tensors[name]
        begin = stored.begin + max(stored.nbytes - nbytes, 0) // 2
        return self._map[begin : min(begin + nbytes, stored.begin + stored.nbytes)]

    def release(self, name: str) -> None:
        """Give back the memory of a tensor; using it again reads the file again."""
        self._release(self.tensors[name].span)

    def _release(self, span: Span) -> None:
        if self.ahead:
            self.ahead.release(span)
        if not hasattr(mmap, "MADV_DONTNEED"):  # This system cannot do it.
            return
        begin = -(-span.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (span.begin + span.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            with contextlib.suppress(OSError):  # A failure only costs memory.
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
