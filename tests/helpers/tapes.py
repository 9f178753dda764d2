"""Checks the memory of recorded operators, and makes small steps to record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from mtpc.backends.eager import EagerBackend
from mtpc.backends.null import Tape
from mtpc.capture.graph import StepGraph
from mtpc.layout import Layout, StepKey
from mtpc.weights.weights import Weights


def op_names(tape: Tape) -> list[str]:
    """Names of the recorded operators, in order."""
    return [str(entry.op) for entry in tape.entries]


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def taken(tape: Tape, known: set[int]) -> set[int]:
    """The storages that a tape's operators read; each must be known or the tape's own."""
    made, found = set[int](), set[int]()
    for entry in tape.entries:
        given: list[Tensor] = []
        tree_map_only(Tensor, given.append, (entry.args, entry.kwargs))
        assert storages(given) <= known | made, f"{entry.op} takes memory that nobody gave"
        found |= storages(given)
        made |= storages(entry.outputs)
    return found


class _Body(nn.Module):
    """A step of one op over one buffer."""

    def __init__(self, function: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.function = function
        self.register_buffer("counter", torch.arange(4))

    def forward(self) -> None:
        self.function(self.counter)


def counting_graph(function: Callable[[torch.Tensor], Any]) -> StepGraph:
    """A step whose Python code runs unchanged, so that host reads happen during capture."""
    module: Any = _Body(function)
    module.graph = fx.Graph()
    return StepGraph(module, StepKey.decode(1, 0), Layout((), {}), Weights({}))


def lower_eagerly(graph: StepGraph) -> Any:
    return EagerBackend().lower(graph)
