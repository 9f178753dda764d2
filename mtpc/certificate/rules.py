"""Which rule an operator has, and the types of a listing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from mtpc.certificate import arithmetic, kernels, moves, tables
from mtpc.certificate.checker import Checker, Line

_ATEN: dict[str, Callable[[Checker], Any]] = {
    **dict.fromkeys(tables.EXACT | tables.THREADS | {"pow"}, arithmetic.elementwise),
    **dict.fromkeys(tables.FOLDS, arithmetic.fold),
    **dict.fromkeys(("ge", "eq"), arithmetic.compare),
    **dict.fromkeys(("matmul", "bmm"), arithmetic.product),
    **dict.fromkeys(tables.VIEWS, moves.view),
    **dict.fromkeys(tables.CONSTANTS, moves.constant),
    **dict.fromkeys(("index", "index_select", "embedding"), moves.index),
    **dict.fromkeys(("gather", "scatter"), moves.gather),
    **dict.fromkeys(("cat", "stack"), moves.cat),
    **{"where": arithmetic.where, "slice": moves.slice_},
    **{"copy": moves.copy, "index_copy": moves.put},
}
OPERATORS: dict[str, Callable[[Checker], Any]] = {
    **{f"aten::{name}": rule for name, rule in _ATEN.items()},
    **dict.fromkeys(tables.KERNELS, kernels.kernel),
    **{"get": moves.get, "getitem": moves.part},
}


def types_of(
    lines: Sequence[Line], dispatched: Collection[str] = (), on_gpu: bool = False
) -> list[str]:
    """The type of each line; arguments are `Checker`'s.

    Raises:
        RefusedError: what the step emits or keeps for a request may depend on another one, on their
            number, or on where its rows are; the message names the operator.
    """
    checker = Checker(lines, dispatched, on_gpu)
    results = [checker.read(line, OPERATORS) for line in lines]
    return ["; ".join(map(str, one if isinstance(one, list) else [one])) for one in results]
