"""Ranks agree on the calls of a step before it runs.

Each rank computes routers, norms and choices from the same bits, and must get the same bits: by the
same kernels in the same configurations. And each must make the same exchanges in the same order, or
all would hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from torch import fx

from mtpc.capture.graph import StepGraph, operators
from mtpc.errors import RankError
from mtpc.ops.collectives import is_collective
from mtpc.program.ranks import Ranks

_CHOICE = "configs"
"""The argument of a kernel that names its configurations."""


def agree_on_calls(graph: StepGraph, ranks: Ranks) -> int:
    """Give each call the configuration that rank 0 has chosen for it.

    Args:
        graph: bound to kernels, not lowered yet. Every rank calls this for the same steps.
        ranks: this process among those that share the model.

    Returns:
        How many calls have another configuration now.

    Raises:
        RankError: another rank's step makes other exchanges.
    """
    calls = dict(_named(graph))
    exchanges = [str(target) for _, target in operators(graph.graph) if is_collective(target)]
    own = {name: node.kwargs.get(_CHOICE, "") for name, node in calls.items()}
    every = ranks.tell_all((exchanges, own))
    for rank, (theirs, _) in enumerate(every):
        for index, (one, other) in enumerate(zip_longest(theirs, exchanges)):
            if one != other:
                raise RankError(
                    f"{graph.name}: exchange {index} of rank {rank} of {ranks.size} is {one}, and "
                    f"rank {ranks.rank}'s is {other}; ranks would wait for each other for ever: "
                    "give all ranks the same machine, libraries and options"
                )
    changed = 0
    for name, choice in every[0][1].items():
        if name in own and own[name] != choice:
            node = calls[name]
            node.kwargs = {**node.kwargs, _CHOICE: choice}
            changed += 1
    return changed


def _named(graph: StepGraph) -> Iterator[tuple[tuple[str, int], fx.Node]]:
    """Calls of kernels that have configurations, by name and how often it came before."""
    seen = Counter[str]()
    for node, target in operators(graph.graph):
        schema = getattr(target, "_schema", None)
        if schema is not None and any(one.name == _CHOICE for one in schema.arguments):
            yield (str(target), seen[str(target)]), node
            seen[str(target)] += 1
