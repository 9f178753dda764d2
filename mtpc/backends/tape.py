"""A tape: a step as a list of calls over planned memory, which `cpu_kernels/runner.cpp` runs.

A warm start needs no other part of the cpu backend. The file holds no code: each of its entries is
a method of the runner's object and arguments for it, which the runner checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.errors import BackendError

FUNCTIONS = (
    "copy", "neg", "not", "logical_not", "isfinite", "cos", "sin", "exp", "sqrt", "rsqrt",
    "sigmoid", "silu",
    "add", "sub", "mul", "div", "floor_divide", "remainder", "minimum", "maximum", "and", "or",
    "eq", "ne", "lt", "le", "gt", "ge",
    "where",
)  # fmt: skip
"""What a call of "map" computes, by number: `Function` of `cpu_kernels/tape.h`."""
FOLDINGS = ("sum", "maximum", "minimum", "any", "all", "scan")
"""What a call of "fold" computes: `Folding` of `cpu_kernels/tape.h`."""
INTEGERS, FLOATS, DOUBLES = range(3)
"""In what numbers: `Arithmetic` of `cpu_kernels/tape.h`."""
NOTHING, TENSOR, INTEGER, REAL, BOOLEAN, TEXT, LIST = range(7)
"""Tags of arguments: `Tag` of `cpu_kernels/runner.cpp`."""
_METHODS = ("bound", "planned", "returned", "numbers", "tensor", "kernel", "aten", "map", "fold",
            "move_rows", "release")  # fmt: skip
_SHOWN = 80
"""Characters of an entry that an error shows."""

Entry = Sequence[Any]
"""A method's name, then its arguments."""


def write_tape(arena_bytes: int, entries: Sequence[Entry]) -> str:
    """The text of a tape's file."""
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    return f'{{"arena": {arena_bytes}, "entries": [\n{lines}\n]}}\n'


def open_tape(text: str | bytes, tensor_of: Callable[[str], Tensor]) -> Run:
    """Load a tape and bind it to tensors, which it uses in place.

    The kernels must be loaded before (`cpu_kernels.load_kernels`). The returned callable releases
    Python's lock. It must not run in two threads at the same time.

    Args:
        text: of the tape's file.
        tensor_of: name -> tensor.

    Raises:
        BackendError: the text is no tape of this version, or a tensor does not fit it.
    """
    entry: Any = None
    try:
        value = json.loads(text)
        tape = torch.classes.mtpc_runner.Tape(value["arena"])
        for entry in value["entries"]:
            method, *arguments = entry
            if method not in _METHODS:
                raise ValueError(f"{method!r} is none of {', '.join(_METHODS)}")
            if method == "bound":
                arguments = [tensor_of(*arguments)]
            getattr(tape, method)(*arguments)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise BackendError(
            f"a step's tape does not fit at {json.dumps(entry)[:_SHOWN]}: "
            f"{str(error).splitlines()[0]}; run `mtpc cache verify`, and build the step again"
        ) from error
    run: Run = tape.run
    return run
