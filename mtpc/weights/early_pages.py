"""Memory for weights that a process takes while it waits for something else.

What a process touches first has to be zeroed, and in a virtual machine its host may have to find
it. That can take longer than to pack weights into it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from mtpc.weights.packing import SharedPages, map_memory

_HUGE_PAGE, _STEP_BYTES = 2 << 20, 16 << 20
_POPULATE_WRITE = 23
"""Linux's advice MADV_POPULATE_WRITE, since 5.14: take memory from the system now."""


class EarlyPages(SharedPages):
    """Pages that weights share, of which the first `nbytes` can be taken early. Weights of any size
    are made there, one behind the other, until one does not fit.

    Attributes:
        early: bytes that were taken and are not used.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._memory = map_memory(nbytes + _HUGE_PAGE)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._begin = -flat.data_ptr() % _HUGE_PAGE
        self._first, self._end, self._taken = flat[self._begin :][:nbytes], 0, 0

    @property
    def early(self) -> int:  # type: ignore[override]  # It changes here.
        return max(0, self._taken - self._end)

    def taking(self) -> Iterator[None]:
        """Take the memory, some at each step."""
        size = len(self._first)
        with contextlib.suppress(OSError):  # An older system gives memory when it is touched.
            for start in range(0, size // _STEP_BYTES * _STEP_BYTES, _STEP_BYTES):
                self._memory.madvise(_POPULATE_WRITE, self._begin + start, _STEP_BYTES)
                self._taken = start + _STEP_BYTES
                yield

    def give_back(self) -> None:
        """Give back what was taken and is not used; from now on, pages are new ones."""
        start = self._begin + -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        self._first, self._taken = self._first[:0], 0
        with contextlib.suppress(OSError):  # A failure only costs memory.
            self._memory.madvise(mmap.MADV_DONTNEED, start, len(self._memory) - start)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As that of `SharedPages`."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._end + nbytes > len(self._first):
            if len(self._first):
                self.give_back()
            return super().allocate(shape, dtype)
        flat = self._first[self._end :][:nbytes]
        self._end += -(-nbytes // 64) * 64
        return flat.view(dtype).view(shape)
