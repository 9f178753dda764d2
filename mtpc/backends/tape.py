"""A tape: a step as a list of calls over planned memory, which `cpu_kernels/runner.cpp` runs.

A warm start needs no other part of the cpu backend. The file holds no code: each of its entries is
a method of the runner's object and arguments for it, which the runner checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.backends.placing import Live, place_live, pool_bytes
from mtpc.errors import BackendError, CacheError
from mtpc.layout.open_sizes import NO_SIZES, size_of
from mtpc.layout.specs import is_buffer_name

FUNCTIONS = (
    "copy", "neg", "not", "logical_not", "isfinite", "cos", "sin", "exp", "sqrt", "rsqrt",
    "sigmoid", "silu", "softplus",
    "add", "sub", "mul", "div", "floor_divide", "remainder", "minimum", "maximum", "and", "or",
    "eq", "ne", "lt", "le", "gt", "ge",
    "where",
)  # fmt: skip
"""What a call of "map" computes, by number: `Function` of `cpu_kernels/tape.h`."""
FOLDINGS = ("sum", "maximum", "minimum", "any", "all", "scan")
"""What a call of "fold" computes: `Folding` of `cpu_kernels/tape.h`."""
INTEGERS, FLOATS, DOUBLES = range(3)
"""The numbers that a call computes in: `Arithmetic` of `cpu_kernels/tape.h`."""
NOTHING, TENSOR, INTEGER, REAL, BOOLEAN, TEXT, LIST = range(7)
"""Tags of arguments: `Tag` of `cpu_kernels/runner.cpp`."""
_METHODS = ("bound", "planned", "returned", "numbers", "tensor", "kernel", "aten", "map", "fold",
            "move_rows", "release")  # fmt: skip
LINE = 64
"""Planned memory begins at multiples of this many bytes, a line of the processor's caches."""
_SHOWN = 80
"""Characters of an entry that an error shows."""

Entry = Sequence[Any]
"""A method's name, then its arguments."""


def write_tape(arena_bytes: int, entries: Sequence[Entry]) -> str:
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    return f'{{"arena": {arena_bytes}, "entries": [\n{lines}\n]}}\n'


def open_tape(
    text: str | bytes, tensor_of: Callable[[str], Tensor], sizes: Mapping[str, int] = NO_SIZES
) -> Run:
    """Load a tape and bind it to tensors, which it uses in place.

    The kernels must be loaded before (`cpu_kernels.load_kernels`). The returned callable releases
    Python's lock. It must not run in two threads at the same time.

    It may write buffers (`is_buffer_name`), and no weight. `sizes` has numbers for the sizes that
    it leaves open.

    Raises:
        BackendError: the text is no tape of this version, a tensor does not fit it, or it writes a
            weight.
    """
    entry: Any = None
    try:
        value = json.loads(text)
        arena, entries = _sized(value["arena"], value["entries"], sizes)
        tape = torch.classes.mtpc_runner.Tape(arena)
        for entry in entries:
            method, *arguments = entry
            if method not in _METHODS:
                raise ValueError(f"{method!r} is none of {', '.join(_METHODS)}")
            if method == "aten" and arguments[0].startswith("mtpc::"):
                # A reference, for a call that no kernel takes. Few tapes have one.
                import mtpc.backends.cpu.ops  # noqa: F401  (declares it)
            if method == "bound":
                arguments = [tensor_of(*arguments), is_buffer_name(*arguments)]
            getattr(tape, method)(*arguments)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, CacheError) as error:
        raise BackendError(
            f"a step's tape does not fit at {json.dumps(entry)[:_SHOWN]}: "
            f"{str(error).splitlines()[0]}; run `mtpc cache verify`, and build the step again"
        ) from error
    run: Run = tape.run
    return run


def _sized(
    arena: int, entries: Sequence[Entry], sizes: Mapping[str, int]
) -> tuple[int, Iterator[Entry]]:
    """Bytes of the arena, and the entries with numbers for open sizes.

    "grown" memory has open sizes. It is placed here, behind what was planned when the tape was
    written.
    """
    start = round_up(arena)
    grown = ((number, entry) for number, entry in enumerate(entries) if entry[0] == "grown")
    live = [
        Live(str(number), round_up(size_of(size, sizes)), first, last)
        for number, (_, size, first, last) in grown
    ]
    placed = place_live(live)
    offsets = {int(place.live.name): start + place.offset for place in placed}

    def numbered() -> Iterator[Entry]:
        for number, (method, *given) in enumerate(entries):
            if method == "grown":
                yield "planned", offsets[number], size_of(given[0], sizes)
            elif method == "returned":
                yield method, size_of(given[0], sizes)
            elif method == "tensor":
                storage, dtype, shape, strides, offset = given
                resolved = ([size_of(n, sizes) for n in of] for of in (shape, strides))
                yield method, storage, dtype, *resolved, size_of(offset, sizes)
            else:
                yield method, *given

    return (start + pool_bytes(placed) if placed else arena), numbered()


def round_up(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
