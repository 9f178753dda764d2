"""Which memory the operators of a recorded step take."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils._pytree import tree_map_only

from mtpc.backends.null import Tape


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def taken(tape: Tape, known: set[int]) -> set[int]:
    """Storages that a tape's operators take; fails where one is neither known nor its own."""
    made, found = set[int](), set[int]()
    for entry in tape.entries:
        given: list[Tensor] = []
        tree_map_only(Tensor, given.append, (entry.args, entry.kwargs))
        assert storages(given) <= known | made, f"{entry.op} takes memory that nobody gave"
        found |= storages(given)
        made |= storages(entry.outputs)
    return found
