"""Reads tensors from files in the order of their use, while earlier ones are packed.

It is for files that the page cache cannot keep. A thread reads them with O_DIRECT, which bypasses
the page cache, into memory of its own. A memory map would be slower: a process that touches a new
page of it waits for the disk, and takes a page fault for every few pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from mtpc.errors import CheckpointError
from mtpc.weights.packing import map_memory
from mtpc.weights.tensor_file import Span

_BLOCK_BYTES = 16 << 20
"""Bytes that one system call reads."""
_OWN_BYTES = 2 << 20
"""A smaller span gets memory of its own, because steps may keep it."""


class _Arena:
    """Memory that large spans use in turn: the lowest free part first, because new memory is slow.

    One thread alone calls `take`. A part is free again when its last view is gone, in any thread.
    """

    def __init__(self, nbytes: int):
        self._memory, self._end = map_memory(max(nbytes, mmap.PAGESIZE)), nbytes
        self._taken = dict[int, int]()
        self._given_back = list[int]()

    def take(self, size: int) -> memoryview | None:
        """So many adjacent bytes, a multiple of a page; None if no free part is as large."""
        self._settle()
        begin = 0
        for start, end in sorted(self._taken.items()):
            if start - begin >= size:
                break
            begin = end
        if begin + size > self._end:
            return None
        self._taken[begin] = begin + size
        view = memoryview(self._memory)[begin : begin + size]
        weakref.finalize(view, self._given_back.append, begin)
        return view

    def close(self) -> None:
        """Give unused memory back to the system; views keep theirs, and the mapping its address."""
        self._settle()
        begin = 0
        for start, end in [*sorted(self._taken.items()), (self._end, self._end)]:
            if start > begin and hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):  # A failure only costs memory.
                    self._memory.madvise(mmap.MADV_DONTNEED, begin, start - begin)
            begin = end

    def _settle(self) -> None:
        while self._given_back:
            del self._taken[self._given_back.pop()]


class ReadAhead:
    """Spans of files, read by one thread in their order, in about which they are taken. A context
    manager, which ends the thread.

    At most `limit` bytes are in memory at once. One span alone may exceed it, and so may spans that
    the caller takes before it releases earlier ones. The largest span has `largest` bytes.
    """

    def __init__(self, wanted: Iterable[Span], limit: int, largest: int):
        fit = (span for span in wanted if 0 < span.nbytes <= largest)
        self._waiting = OrderedDict.fromkeys(fit)
        self._limit, self._held = limit, 0
        most = max((span.nbytes for span in self._waiting), default=0)
        self._arena = _Arena(_pages(2 * limit + most))
        self._read: dict[Span, Future[memoryview]] = {}
        self._files: dict[Path, int] = {}
        self._thread = ThreadPoolExecutor(1, "mtpc-read-ahead")

    def __enter__(self) -> ReadAhead:
        self._go_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()
        self._read.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._arena.close()

    def take(self, span: Span) -> tuple[memoryview, int] | None:
        """Memory that holds a span, and the span's offset in it; None if it is not wanted any more.

        The memory serves another span when nothing refers to the view any more.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if span in self._waiting:
            self._begin(span)
        if span not in self._read:
            return None
        try:
            return self._read[span].result(), span.begin % mmap.PAGESIZE
        except OSError as error:
            raise CheckpointError(
                f"cannot read {span.nbytes} bytes of {span.path} at {span.begin}: {error}; expected"
                " the file that was opened: copy or download it again"
            ) from None

    def release(self, span: Span) -> None:
        """Forget a span, taken or not. Tensors over its memory keep the memory."""
        self._waiting.pop(span, None)
        if self._read.pop(span, None) is not None:
            self._held -= span.nbytes
            self._go_on()

    def _go_on(self) -> None:
        """Start to read as many spans as the limit allows."""
        while self._waiting:
            span = next(iter(self._waiting))
            if self._held and self._held + span.nbytes > self._limit:
                return
            self._begin(span)

    def _begin(self, span: Span) -> None:
        del self._waiting[span]
        self._held += span.nbytes
        self._read[span] = self._thread.submit(self._fill, span)

    def _fill(self, span: Span) -> memoryview:
        """Read the pages of the file that hold a span. Runs in the thread."""
        first = span.begin // mmap.PAGESIZE * mmap.PAGESIZE
        needed = span.begin + span.nbytes - first
        size = _pages(needed)
        # Touching new memory takes longer than reading a file.
        view = self._arena.take(size) if size >= _OWN_BYTES else None
        view = memoryview(map_memory(size)) if view is None else view
        file, done = self._open(span.path), 0
        while done < needed:
            count = os.preadv(file, [view[done : done + _BLOCK_BYTES]], first + done)
            if count == 0:
                raise OSError(f"it ends {needed - done} bytes too early")
            done += count
        return view

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.preadv(self._files[path], [map_memory(mmap.PAGESIZE)], 0)
            except OSError:  # Not every file system reads past the page cache.
                os.close(self._files[path])
                self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _pages(nbytes: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
