"""The eager backend: runs the FX graph node by node on the reference ops. The oracle."""

from __future__ import annotations

from collections import Counter

import torch

from mtpc.backends.base import Run
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass


class EagerBackend:
    """Executes StepGraphs in Python; the meaning that every other backend must reproduce."""

    name = "eager"
    enables: tuple[str, ...] = ()
    device = "cpu"
    package = None

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        """The reference ops are this backend's ops."""
        return ()

    def lower(self, graph: StepGraph) -> Run:
        """The graph's generated Python code, without autograd."""
        module = graph.module

        @torch.inference_mode()
        def run() -> None:
            module()

        return run

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Nothing to capture: every call runs the graph."""
        return run
