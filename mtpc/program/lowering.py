"""From a traced graph to an artifact: the pass pipeline, the calls that ranks agree on, a backend.

Each rank computes routers, norms and choices from the same bits, and must get the same bits: by the
same kernels in the same configurations. And each must make the same exchanges in the same order, or
all would hang.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx

from mtpc.backends.base import Backend
from mtpc.backends.pipeline import select_passes
from mtpc.capture.graph import StepGraph, get_tensor, operators
from mtpc.errors import RankError
from mtpc.ops.collectives import is_collective
from mtpc.passes import Pass, Policy, Sharding, Verifier, run_pipeline
from mtpc.passes.copy_layers import CopyLayers
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
        self,
        graph: StepGraph,
        ending: Sequence[Pass] = (),
        until: str | None = None,
        seen: Seen = lambda name, graph: None,
    ) -> StepGraph:
        """Run the pass pipeline in place, verifying after each pass.

        Args:
            graph: as traced.
            ending: what follows the backend's passes: copied layers, and what ranks agree on.
            until: stop after this pass; None runs them all.
            seen: called with each pass's name and the graph after it.

        Raises:
            GraphError: a pass left an invalid graph.
        """
        enables = self.backend.enables
        passes = select_passes(self.plan, enables, self.buffer_names, self.sharding)
        rewriting = (*passes, *self.backend.legalise())
        verify = Verifier(self.plan.verify_passes)

        def check(graph: StepGraph, name: str) -> None:
            nonlocal verify
            if name == CopyLayers.name:  # More layers have other effects, and verified values.
                verify = Verifier(propagate=False)
            verify(graph, name)
            if name == rewriting[-1].name:
                Verifier(propagate=True)(graph, name)
            seen(name, graph)

        run_pipeline(graph, (*rewriting, *ending), check, until)
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


@dataclass(frozen=True)
class AgreeOnCalls:
    """agree-on-calls: give each call the configuration that rank 0 has chosen for it.

    Every rank runs it on the same steps, bound to kernels and not lowered yet. It counts the calls
    that have another configuration now.

    Attributes:
        ranks: this process among those that share the model.

    Raises:
        RankError: another rank's step makes other exchanges.
    """

    ranks: Ranks
    name: ClassVar[str] = "agree-on-calls"
    policy: ClassVar[Policy] = "required"

    def apply(self, graph: StepGraph) -> int:
        calls, ranks = dict(_named(graph)), self.ranks
        exchanges = [str(target) for _, target in operators(graph.graph) if is_collective(target)]
        own = {name: node.kwargs.get(_CHOICE, "") for name, node in calls.items()}
        every = ranks.tell_all((exchanges, own))
        for rank, (theirs, _) in enumerate(every):
            for index, (one, other) in enumerate(zip_longest(theirs, exchanges)):
                if one != other:
                    raise RankError(
                        f"{graph.name}: exchange {index} of rank {rank} of {ranks.size} is {one}, "
                        f"and rank {ranks.rank}'s is {other}; ranks would wait for each other for "
                        "ever: give all ranks the same machine, libraries and options"
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
