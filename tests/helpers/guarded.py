"""Memory of which only some rows may be read: a process that reads another one dies."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_KEPT: list[mmap.mmap] = []
WIDTH = mmap.PAGESIZE // 4
"""float32 values that fill a page of memory."""


def guarded(shape: tuple[int, ...], live: Iterable[int], spared: bool) -> tuple[Tensor, Tensor]:
    """Random numbers, and a copy whose rows fill pages of memory; only the live rows may be read.

    Args:
        shape: [..., rows, WIDTH].
        live: rows of all leading dimensions together.
        spared: whether all live rows may be read; else not the first of them, so that a process
            which reads them dies.
    """
    values = torch.randn(shape)
    memory = mmap.mmap(-1, values.nbytes)
    _KEPT.append(memory)
    copy = torch.frombuffer(memory, dtype=torch.float32).view(shape).copy_(values)
    rows, live = copy.view(-1, shape[-1]), set(live)
    for row in set(range(len(rows))) - (live if spared else live - {min(live)}):
        place = rows[row].data_ptr()
        assert place % mmap.PAGESIZE == 0 == rows[row].nbytes % mmap.PAGESIZE
        assert _LIBC.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(rows[row].nbytes), 0) == 0
    return values, copy
