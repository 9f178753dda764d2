"""From a traced graph to an artifact: the pass pipeline, the calls that ranks agree on, a backend.

Each rank computes routers, norms and choices from the same bits, and must get the same bits: by the
same kernels in the same configurations. And each must make the same exchanges in the same order, or
all would hang.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import fx

from mtpc.backends.base import Backend
from mtpc.backends.pipeline import select_passes
from mtpc.capture.graph import StepGraph, get_tensor, operators
from mtpc.errors import RankError
from mtpc.ops.collectives import is_collective
from mtpc.passes import Sharding, Verifier, run_pipeline
from mtpc.plan import Plan
from mtpc.program.program import CapturedStep

if TYPE_CHECKING:
    from mtpc.program.ranks import Ranks

Seen = Callable[[str, StepGraph], None]
"""Called with a pass's name and the graph after it."""


@dataclass(frozen=True)
class Lowering:
    """How graphs become steps of one backend.

    Attributes:
        backend: lowers and captures; its passes end the pipeline.
        buffer_names: layout name by tensor id, for state that model pieces hold.
        plan: says which passes run, and how each is verified.
        sharding: what this rank holds of the model; None is all.
    """

    backend: Backend
    buffer_names: Mapping[int, str]
    plan: Plan
    sharding: Sharding | None = None

    def rewrite(
        self, graph: StepGraph, until: str | None = None, seen: Seen = lambda name, graph: None
    ) -> StepGraph:
        """Run the pass pipeline in place, verifying after each pass.

        Args:
            graph: as traced.
            until: stop after this pass; None runs them all.
            seen: called with each pass's name and the graph after it.

        Raises:
            GraphError: a pass left an invalid graph.
        """
        enables = self.backend.enables
        passes = select_passes(self.plan, enables, self.buffer_names, self.sharding)
        pipeline = (*passes, *self.backend.legalise())
        verify = Verifier(self.plan.verify_passes)

        def check(graph: StepGraph, name: str) -> None:
            verify(graph, name)
            seen(name, graph)

        run_pipeline(graph, pipeline, check, until)
        if until is None:
            Verifier(propagate=True)(graph, pipeline[-1].name)
        return graph

    @torch.no_grad()
    def capture(self, graph: StepGraph) -> CapturedStep:
        """Build a rewritten graph, and open it over the tensors that it holds."""
        start = time.perf_counter()
        sizes = {str(symbol): number for symbol, number in graph.layout.sizes.items()}
        opened = self.backend.build(graph).open(partial(get_tensor, graph.module), sizes)
        seconds = time.perf_counter() - start
        own = opened.graph or graph
        return CapturedStep(graph.key, graph.layout, graph.buffers(), opened.run, seconds, own)


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
