"""An artifact that is the graph itself: for backends whose steps live in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtpc.backends.base import Artifact, Begin, OpenStep, Run, TensorOf
from mtpc.backends.package import Package, signature
from mtpc.capture.graph import StepGraph, get_tensor, set_tensor


@dataclass(frozen=True)
class GraphArtifact:
    """A graph after all passes, without tensors, and what its backend does when they are there: the
    forms of these, by name, are in `package`."""

    package: Package
    graph: StepGraph
    backend: GraphBackend

    @property
    def files(self) -> Mapping[str, bytes]:
        """None: the graph is in this process only."""
        return {}

    def open(
        self, tensor_of: TensorOf, sizes: Mapping[str, int], begin: Begin = lambda stage: None
    ) -> OpenStep:
        """Lower and capture a copy of the graph over tensors; see `Artifact.open`."""
        graph = self.graph.clone()
        for name in self.package.tensors:
            set_tensor(graph.module, name, tensor_of(name))
        begin("lower")
        run = self.backend.lower(graph)
        begin("capture")
        return OpenStep(self.backend.capture(run, graph), graph)


class GraphBackend:
    """A backend whose artifacts are graphs. Its own part is `lower`, and `capture` if need be."""

    makes_files = False

    def build(self, graph: StepGraph) -> Artifact:
        held = sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"})
        own, tensors = graph.clone(), dict[str, str]()
        for name in held:
            tensor = get_tensor(graph.module, name)
            tensors[name] = signature(tensor)
            set_tensor(own.module, name, tensor.detach().to("meta"))
        return GraphArtifact(Package(tensors), own, self)

    def lower(self, graph: StepGraph) -> Run:
        """Compile a graph over the tensors that it holds; see `Artifact.open`."""
        raise NotImplementedError

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Turn a lowered step into a replay. Without a device, every call runs the graph."""
        return run
