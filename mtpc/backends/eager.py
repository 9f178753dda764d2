"""The eager backend: it runs the FX graph node by node on the reference ops.

It is the oracle for all other backends.
"""

from __future__ import annotations

from collections import Counter

import torch

from mtpc.backends.base import Run
from mtpc.backends.graph_artifact import GraphBackend
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass


class EagerBackend(GraphBackend):
    """Runs StepGraphs in Python; every other backend must give its results."""

    name = "eager"
    enables: tuple[str, ...] = ()
    device = "cpu"

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        return ()

    def lower(self, graph: StepGraph) -> Run:
        """The Python code that FX generates for the graph, run without autograd."""
        module = graph.module

        @torch.inference_mode()
        def run() -> None:
            module()

        return run
