"""Which rule an operator has, and a listing line by line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mtpc.certificate import arithmetic, kernels, moves, tables
from mtpc.certificate.state import Checker
from mtpc.certificate.values import RefusedError, UnknownError

_RULES: dict[str, Any] = {
    **dict.fromkeys(tables.EXACT | tables.THREADS | {"pow"}, arithmetic.elementwise),
    **dict.fromkeys(tables.FOLDS, arithmetic.fold),
    **dict.fromkeys(("ge", "eq"), arithmetic.compare),
    **dict.fromkeys(("matmul", "bmm"), arithmetic.product),
    **dict.fromkeys(tables.VIEWS, moves.view),
    **dict.fromkeys(tables.CONSTANTS, moves.constant),
    **dict.fromkeys(("index", "index_select", "embedding"), moves.index),
    **dict.fromkeys(("gather", "scatter"), moves.gather),
    **dict.fromkeys(("cat", "stack"), moves.cat),
    "where": arithmetic.where,
    "slice": moves.slice_,
    "copy": moves.copy,
    "index_copy": moves.put,
    "get": moves.get,
    "getitem": lambda c: c.at("self")[c.args["index"]],
}


def types_of(
    lines: Sequence[Sequence[Any]], dispatched: Collection[str] = (), on_gpu: bool = False
) -> list[str]:
    """The type of each line: kind, what places of its dimensions are, and what a number names.

    Args:
        lines: [name, operator, {argument: value}, shapes, dtypes] each; an argument that is a
            line's result begins with "%".
        dispatched: ATen's operators that run through PyTorch's dispatcher on a CPU.
        on_gpu: whether elementwise operators have a thread for each element.

    Raises:
        RefusedError: what the step emits or keeps for a request may depend on another one, on their
            number, or on where its rows are; the message names the operator.
    """
    checker, types = Checker(lines, frozenset(dispatched), on_gpu), []
    for line in lines:
        checker.begin(line)
        found = checker.values[line[0]] = _typed(checker)
        types.append("; ".join(map(str, found if isinstance(found, list) else [found])))
    return types


def _typed(c: Checker) -> Any:
    """What the line that has begun gives."""
    rule = kernels.kernel if c.op in tables.KERNELS else _RULES.get(c.base)
    if rule is None and (c.in_place or not c.op.startswith("aten::")):
        raise RefusedError(f"{c.op} ({c.name}) has no rule")
    try:
        found = rule(c) if rule else c.unknown("has no rule")
    except UnknownError as error:
        found = error.results
    if c.op in tables.KERNELS:
        return found
    if c.in_place:
        moves.store(c, c.args["self"][1:], found)
    elif c.base in tables.VIEWS:
        moves.share(c, c.args["self"][1:])
    return found
