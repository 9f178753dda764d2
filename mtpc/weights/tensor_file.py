"""One safetensors file: its header checked, its tensors mapped, their memory given back.

The map is this process's own, private, and never written to: what is released is read again from
the file (the page cache, as a rule) should anybody look. safetensors checks the file; its own map
cannot be released in part.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtpc.errors import CheckpointError

_DTYPES = {
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
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of a tensor.

    Attributes:
        path: its file.
        dtype: as written there, "BF16".
        shape: its sizes.
        begin: its first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class TensorFile:
    """A file's tensors.

    Args:
        path: a safetensors file.

    Attributes:
        tensors: by name, as the header lists them.

    Raises:
        CheckpointError: header or length are not what safetensors wrote.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: "
                f"{error}; copy or download it again"
            ) from None
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensors = self._read_header()

    def _read_header(self) -> dict[str, StoredTensor]:
        """8 bytes of length, then JSON, then the tensors."""
        begin = 8 + int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8:begin])
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                self.path, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored, read where it is used.

        Raises:
            CheckpointError: torch has no such dtype.
        """
        stored = self.tensors[name]
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {name} is {stored.dtype}; expected one of {', '.join(_DTYPES)}"
            )
        count = prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.begin)
        return flat.view(stored.shape)

    def release(self, name: str) -> None:
        """Give the memory of a tensor back; whoever looks at it again reads the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # Not this system's way.
            return
        stored = self.tensors[name]
        size = prod(stored.shape) * _DTYPES[stored.dtype].itemsize
        begin = -(-stored.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (stored.begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            with contextlib.suppress(OSError):  # Nothing but memory depends on it.
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
