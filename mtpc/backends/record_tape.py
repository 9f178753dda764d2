"""Memory, tensors and calls of a tape, as they are recorded.

Sizes are static, so each view is a tensor that exists before the step runs, and each temporary that
`cpu_kernels/between.cpp` computes has its place in memory that is planned ahead.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.package import signature_text
from mtpc.backends.placing import Live, place_live, pool_bytes
from mtpc.backends.tape import (
    BOOLEAN,
    DOUBLES,
    FLOATS,
    FOLDINGS,
    FUNCTIONS,
    INTEGER,
    INTEGERS,
    LIST,
    NOTHING,
    REAL,
    TENSOR,
    TEXT,
    Entry,
    round_up,
)
from mtpc.capture.graph import dim_of
from mtpc.errors import BackendError
from mtpc.layout.buffers import text_of
from mtpc.layout.open_sizes import Size

_DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e4m3fn: 24,
}  # fmt: skip
"""torch's numbers of dtypes in C++."""


@dataclass
class _Storage:
    """Memory of a tape: its entry, for planned memory without the offset; the storage offset, in
    elements, from which offsets of its views count; and the numbers of the first and the last call
    that use it."""

    entry: list[Any]
    base: int = 0
    first: int = -1
    last: int = -1


@dataclass
class TapeRecorder:
    """Makes the entries of one step: memory, and tensors and views, by number; and calls, in order
    of execution."""

    storages: list[_Storage] = field(default_factory=list)
    tensors: list[Entry] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    _storage_of: dict[int, int] = field(default_factory=dict)
    _number_of: dict[Any, int] = field(default_factory=dict)

    # ---- Memory ------------------------------------------------------------------------------

    def bind(self, name: str, value: Tensor) -> None:
        """Memory of a buffer or weight, unless it is known."""
        base = int(value.storage_offset())
        key = value.untyped_storage()._cdata
        if key not in self._storage_of:
            self._add(key, _Storage(["bound", name], base))

    def is_known(self, value: Tensor) -> bool:
        return value.untyped_storage()._cdata in self._storage_of

    def hold(self, value: Tensor, numbers: list[Any]) -> None:
        """Memory with numbers that never change, as the value of a dense tensor."""
        coded = list(map(bits if value.is_floating_point() else int, numbers))
        storage = _Storage(["numbers", _DTYPES[value.dtype], coded])
        self._add(value.untyped_storage()._cdata, storage)

    def new(self, kind: str, value: Tensor) -> None:
        """Memory of a call's result: "planned" or "returned"."""
        nbytes = size_text(value, value.untyped_storage().nbytes())
        kind = "grown" if kind == "planned" and isinstance(nbytes, str) else kind
        self._add(value.untyped_storage()._cdata, _Storage([kind, nbytes]))

    def _add(self, key: int, storage: _Storage) -> None:
        self._storage_of[key] = len(self.storages)
        self.storages.append(storage)

    def slot(self, value: Tensor) -> int:
        storage = self._storage_of[value.untyped_storage()._cdata]
        offset = size_text(value, value.storage_offset() - self.storages[storage].base)
        sizes, strides = ([size_text(value, n) for n in of] for of in (value.shape, value.stride()))
        entry = ("tensor", storage, _DTYPES[value.dtype], sizes, strides, offset)
        key = repr(entry)
        if key not in self._number_of:
            self._number_of[key] = len(self.tensors)
            self.tensors.append(entry)
        return self._number_of[key]

    # ---- Calls -------------------------------------------------------------------------------

    def call(self, *entry: Any, uses: list[int]) -> None:
        """Add a call that uses tensors of some numbers."""
        for number in uses:
            storage = self.storages[self.tensors[number][1]]
            if storage.first < 0:
                storage.first = len(self.calls)
            storage.last = len(self.calls)
        self.calls.append(list(entry))

    def map(self, function: str, out: Tensor, *operands: Any, kind: torch.dtype) -> None:
        """out = function(operands), by elements, computed in the arithmetic of a dtype."""
        arithmetic = arithmetic_of(kind)
        code, uses = [self.slot(out)], [self.slot(out)]
        for operand in operands:
            if isinstance(operand, Tensor):
                number = self.slot(operand)
                code += [1, number]
                uses.append(number)
            else:
                code += [0, int(operand) if arithmetic == INTEGERS else bits(operand)]
        self.call("map", FUNCTIONS.index(function), arithmetic, code, uses=uses)

    def fold(self, folding: str, out: Tensor, value: Tensor, dim: int) -> None:
        """out = value, folded along a dimension, which `out` has with the size 1."""
        numbers = [self.slot(out), self.slot(value)]
        kind = arithmetic_of(torch.promote_types(value.dtype, out.dtype))
        self.call("fold", FOLDINGS.index(folding), kind, *numbers, dim, uses=numbers)

    def move_rows(self, into: bool, rows: Tensor, table: Tensor, indices: list[Tensor]) -> None:
        """rows = table[indices], or the other way round."""
        numbers = [self.slot(tensor) for tensor in (rows, table, *indices)]
        self.call("move_rows", into, *numbers[:2], numbers[2:], uses=numbers)

    def operator(self, node: fx.Node, values: Mapping[str, Any], results: list[Tensor]) -> None:
        """A call of a kernel, or through torch's dispatcher."""
        overload: Any = node.target
        code: list[int] = []
        texts: list[str] = []
        uses: list[int] = []
        for argument in overload._schema.arguments:
            value = values[argument.name]
            if str(argument.type).startswith("Optional[Device"):
                value = None
            self._encode(value, code, texts, uses)
        taken = [self.slot(result) for result in results]
        namespace, _, name = overload._schema.name.partition("::")
        if namespace == "mtpc_cpu":
            entry = ["kernel", name]
        else:
            entry = ["aten", f"{namespace}::{name}", overload._schema.overload_name]
        self.call(*entry, code, texts, taken, uses=uses + taken)

    def _encode(self, value: Any, code: list[int], texts: list[str], uses: list[int]) -> None:
        if value is None:
            code.append(NOTHING)
        elif isinstance(value, Tensor):
            uses.append(self.slot(value))
            code += [TENSOR, uses[-1]]
        elif isinstance(value, bool):
            code += [BOOLEAN, int(value)]
        elif isinstance(value, int):
            code += [INTEGER, value]
        elif isinstance(value, float):
            code += [REAL, bits(value)]
        elif isinstance(value, str):
            code += [TEXT, len(texts)]
            texts.append(value)
        elif isinstance(value, torch.dtype):
            code += [INTEGER, _DTYPES[value]]
        elif isinstance(value, (list, tuple)):
            code += [LIST, len(value)]
            for item in value:
                self._encode(item, code, texts, uses)
        else:
            raise BackendError(f"a tape has no form for {value!r}, an argument of a step's graph")

    # ---- The whole ---------------------------------------------------------------------------

    def entries(self) -> tuple[int, list[Entry]]:
        live = [
            Live(str(number), round_up(storage.entry[1]), storage.first, storage.last)
            for number, storage in enumerate(self.storages)
            if storage.entry[0] == "planned"
        ]
        placed = place_live(live)
        for place in placed:
            self.storages[int(place.live.name)].entry.insert(1, place.offset)
        for storage in self.storages:
            if storage.entry[0] == "grown":
                storage.entry += [storage.first, storage.last]
        ending: dict[int, list[int]] = {}
        for number, storage in enumerate(self.storages):
            if storage.entry[0] == "returned":
                ending.setdefault(storage.last, []).append(number)
        calls: list[Entry] = []
        for number, call in enumerate(self.calls):
            calls.append(call)
            if number in ending:
                calls.append(["release", ending[number]])
        made = [storage.entry for storage in self.storages]
        return pool_bytes(placed), [*made, *self.tensors, *calls]


def size_text(value: Any, size: Any) -> Size:
    """A size of a fake tensor as a tape has it: a number, or text where it has open sizes."""
    return size if isinstance(size, int) else text_of(dim_of(value.fake_mode, size))


def fake_signature(value: Tensor) -> str:
    """A fake tensor's `signature`, with its open sizes."""
    rows = ([size_text(value, n) for n in of] for of in (value.shape, value.stride()))
    return signature_text(value.dtype, *rows)


def bits(value: float) -> int:
    """A double's bits, as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", float(value)))[0])


def arithmetic_of(dtype: torch.dtype) -> int:
    if not dtype.is_floating_point:
        return INTEGERS
    return DOUBLES if dtype == torch.float64 else FLOATS
