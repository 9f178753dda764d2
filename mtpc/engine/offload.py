"""Pages and snapshots in files, so that a later process can reuse what this one has computed.

A page is written when the pool evicts it, and when the engine closes. Its snapshot is written with
it. If a request begins with tokens whose pages are in files, it reads these before its first chunk.

A digest names each file. It covers all that the file's content depends on: the model, its weights
and options, the form of pages, all tokens up to the page's end, and the `lookahead` tokens after
it. A file has the format safetensors. Its metadata hold the digest, and the SHA-256 of its tensors.
A file is refused if any byte of its header differs from what this process would have written, or if
its tensors have another SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from mtpc.engine.offload_files import OffloadDirectory
from mtpc.engine.request import Request
from mtpc.layout.specs import dtype_name
from mtpc.weights.tensor_file import dtype_code

FORMAT = "mtpc-kv-1"
"""Version of the files. Change it when the same name comes to mean other content."""
Kind = Literal["page", "state"]
"""What a file has: a page, or a snapshot."""


class _Form:
    """The files of one kind. Each holds one row of every tensor [count, ...] in `rows`, and is read
    into a row of `into`, whose rows have the same form."""

    def __init__(self, kind: Kind, rows: Mapping[str, Tensor], into: Mapping[str, Tensor]):
        self.kind = kind
        self.entries: dict[str, dict[str, Any]] = {}
        begin, places = 0, list[tuple[Tensor, Tensor, int, int]]()
        # Larger elements come first, so that each tensor begins at a multiple of its elements.
        for name in sorted(rows, key=lambda name: (-rows[name].element_size(), name)):
            tensor = rows[name]
            end = begin + prod(tensor.shape[1:]) * tensor.element_size()
            self.entries[name] = {
                "dtype": dtype_code(dtype_name(tensor.dtype)),
                "shape": list(tensor.shape[1:]),
                "data_offsets": [begin, end],
            }
            places.append((tensor, into[name], begin, end))
            begin = end
        memory = torch.empty(begin, dtype=torch.uint8)
        self.data = memory.numpy().data
        self._views = [
            (rows, target, memory[begin:end].view(rows.dtype).view(rows.shape[1:]))
            for rows, target, begin, end in places
        ]
        self._found = bytearray(len(self.header(bytes(32))))

    @property
    def nbytes(self) -> int:
        return len(self._found) + self.data.nbytes

    def name(self, block: bytes) -> str:
        return f"{block.hex()}.{self.kind}.safetensors"

    def header(self, block: bytes) -> bytes:
        """The header of a block's file, with `data` as its tensors."""
        checksum = hashlib.sha256(self.data).hexdigest()
        metadata = {"format": FORMAT, "block": block.hex(), "sha256": checksum}
        text = json.dumps({"__metadata__": metadata, **self.entries}, separators=(",", ":"))
        padded = text.encode().ljust(-(-len(text) // 8) * 8)
        return len(padded).to_bytes(8, "little") + padded

    def gather(self, row: int) -> None:
        """Copy a row of every tensor in `rows` to `data`."""
        for rows, _, view in self._views:
            view.copy_(rows[row])

    def scatter(self, row: int) -> None:
        """Copy `data` to a row of every tensor in `into`."""
        for _, target, view in self._views:
            target[row].copy_(view)

    def read(self, directory: OffloadDirectory, block: bytes) -> bool:
        """Fill `data` from a block's file. Return whether the file is as a process wrote it. Raises
        OSError: the file cannot be read; FileNotFoundError if there is none."""
        is_whole = directory.read(self.name(block), (memoryview(self._found), self.data))
        return is_whole and bytes(self._found) == self.header(block)

    def write(self, directory: OffloadDirectory, block: bytes) -> None:
        """Write `data` as a block's file. Raises OSError: the file cannot be written."""
        directory.write(self.name(block), (self.header(block), self.data))


class Offload:
    """Copies between pages, snapshots and files.

    Args:
        directory: the files.
        pages: by name, the page pools [pages, ...].
        states: by name, the memory of snapshots [snapshots, ...], and the state of request slots
            from slot 1 on [slots, ...].
        page_size: tokens of a page.
        lookahead: number of tokens after a page on which its content depends.
        identity: a text that identifies everything else on which the content of pages depends.
        fallbacks: counts what could not be written or read, by reason.

    Attributes:
        num_saved: files that this process has written.
        num_loaded: files that requests have read.
    """

    def __init__(
        self,
        directory: OffloadDirectory,
        pages: Mapping[str, Tensor],
        states: Mapping[str, tuple[Tensor, Tensor]],
        page_size: int,
        lookahead: int,
        identity: str,
        fallbacks: Counter[str],
    ):
        self.directory, self._fallbacks = directory, fallbacks
        snapshots = {name: pair[0] for name, pair in states.items()}
        slots = {name: pair[1] for name, pair in states.items()}
        self._forms: dict[Kind, _Form] = {
            "page": _Form("page", pages, pages),
            "state": _Form("state", snapshots, slots),
        }
        self._page_size, self._lookahead = page_size, lookahead
        forms = [form.entries for form in self._forms.values()]
        root = json.dumps([FORMAT, identity, page_size, lookahead, *forms])
        self._root = hashlib.sha256(root.encode()).digest()
        self._refused: set[str] = set()
        self.num_saved = self.num_loaded = 0

    def block(self, request: Request, number: int) -> bytes:
        """The digest of a request's block, by its place from 0 on.

        The tokens of the block and the `lookahead` tokens after it must be known.
        """
        known = request.digests
        while len(known) <= number:
            end = (len(known) + 1) * self._page_size
            keys = request.keys(end - self._page_size, end + self._lookahead)
            parent = known[-1] if known else self._root
            # Their ids, with -1 in images, and then the keys of the images.
            ids = array("q", (key if isinstance(key, int) else -1 for key in keys))
            images = (key for key in keys if isinstance(key, bytes))
            known.append(hashlib.sha256(b"".join([parent, ids.tobytes(), *images])).digest())
        return known[number]

    @property
    def most_pages(self) -> int:
        """The most pages for which the directory has bytes."""
        return self.directory.max_bytes // self._forms["page"].nbytes

    def has(self, kind: Kind, request: Request, number: int) -> bool:
        """Whether a file has the page of a request's block, or the snapshot at the block's end."""
        name = self._forms[kind].name(self.block(request, number))
        # The end of a text counts as used earlier than its beginning, so that it is removed first.
        return name not in self._refused and self._touch(name, time.time_ns() - number)

    def _touch(self, name: str, used: int | None = None) -> bool:
        try:
            return self.directory.touch(name, used)
        except OSError as error:
            self._count("a file cannot be used", error)
            return False

    def load(self, kind: Kind, request: Request, number: int, row: int) -> bool:
        """Copy what `has` found from its file to `row`: of the page pools, or of the state of
        request slots, which begins at slot 1. Return whether that was possible."""
        form, block = self._forms[kind], self.block(request, number)
        name = form.name(block)
        try:
            if form.read(self.directory, block):
                form.scatter(row)
                self.num_loaded += 1
                return True
            self._fallbacks["kv offload: a damaged or foreign file was refused and removed"] += 1
            self.directory.remove(name)
        except FileNotFoundError:  # Another process needed its bytes.
            return False
        except OSError as error:
            self._count("a file cannot be read", error)
        self._refused.add(name)
        return False

    def save(self, kind: Kind, block: bytes, row: int) -> None:
        """Write a page or a snapshot, unless a file has it."""
        form = self._forms[kind]
        name = form.name(block)
        if self._touch(name):
            return
        if form.nbytes > self.directory.max_bytes:
            self._fallbacks[f"kv offload: a file needs {form.nbytes} bytes: nothing is kept"] += 1
            return
        form.gather(row)
        try:
            form.write(self.directory, block)
        except OSError as error:
            self._count("a file was not written", error)
            return
        self.num_saved += 1
        self._refused.discard(name)

    def _count(self, what: str, error: OSError) -> None:
        self._fallbacks[f"kv offload: {what}: {error.strerror}"] += 1
