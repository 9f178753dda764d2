"""From a traced graph to a captured step: the pass pipeline, then one backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mtpc.backends.base import Backend
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.config import CompileOptions
from mtpc.passes import Sharding, Verifier, run_pipeline, select_passes
from mtpc.program.program import CapturedStep

Seen = Callable[[str, StepGraph], None]
"""Called with a pass's name and the graph after it."""


@dataclass(frozen=True)
class Lowering:
    """How graphs become steps of one backend.

    Attributes:
        backend: lowers and captures; its passes end the pipeline.
        buffer_names: layout name by tensor id, for state that model pieces hold.
        options: say which passes run, on which token ids and by which scheme, and how each pass is
            verified.
        sharding: what this rank holds of the model; None is all.
    """

    backend: Backend
    buffer_names: Mapping[int, str]
    options: CompileOptions
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
        options = self.options
        passes = select_passes(
            self.buffer_names,
            options.disabled_passes,
            (*options.enabled_passes, *self.backend.enables),
            options.draft_vocab,
            options.quantize,
            self.sharding,
        )
        pipeline = (*passes, *self.backend.legalise())
        verify = Verifier(options.verify_passes)

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
