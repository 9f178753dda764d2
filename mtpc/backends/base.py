"""The interface of backends: they build a graph into an artifact, which is opened over tensors.

build(graph) -> Artifact        bound to nothing; files, where the graph cache can keep it
artifact.open(tensors) -> Run   once for each set of tensors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mtpc.backends.package import Package
    from mtpc.capture.graph import StepGraph
    from mtpc.passes.base import Pass

FUSE_SKINNY_LINEARS, BATCH_INVARIANT = "fuse-skinny-linears", "batch-invariant"
"""Passes for GPUs that choose operators by the number of rows, so that no other backend runs them.
"""
Run = Callable[[], None]
"""Runs one step over the tensors that it was opened over."""
TensorOf = Callable[[str], Tensor]
"""The tensor of a buffer or weight, by its name."""
Begin = Callable[[str], None]
"""Called with the name of a stage when the stage begins."""


@dataclass(frozen=True)
class OpenStep:
    """A step over its tensors: `run` replays it, fixed work on fixed addresses. The graph is None
    where an artifact holds none."""

    run: Run
    graph: StepGraph | None = None


class Artifact(Protocol):
    """What a backend has made of a graph."""

    @property
    def package(self) -> Package:
        """The names and forms of the tensors, and the sizes, that it can be opened over."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Its files by name; {} where it lives in this process only."""
        ...

    def open(
        self, tensor_of: TensorOf, sizes: Mapping[str, int], begin: Begin = lambda stage: None
    ) -> OpenStep:
        """Bind it to tensors by name, which it uses in place, with numbers for the sizes that it
        leaves open. `begin` is called at "lower" and "capture", where these are done now.

        Raises:
            BackendError: a tensor or a size does not fit, or the backend cannot compile the graph.
            CaptureError: the step does something that a device graph cannot repeat.
        """
        ...


class Backend(Protocol):
    """Builds step graphs.

    Attributes:
        name: value of the option `backend`.
        enables: names of the passes with the policy `backend` that this backend has kernels for.
        device: torch's name of the device where the model and its buffers must be.
        makes_files: whether artifacts are files, which the graph cache keeps. They leave the sizes
            of shared state open, and no rank needs the others to build its own.
        notes: lines on what runs in another way than expected -> count; part of `Stats.fallbacks`.
    """

    name: str
    enables: tuple[str, ...]
    device: str
    makes_files: bool
    notes: Counter[str]

    def free_bytes(self) -> int | None:
        """Bytes left for the KV pool; None where the device's memory is not planned ahead."""
        ...

    def legalise(self) -> tuple[Pass, ...]:
        """Passes that replace reference ops by this backend's kernels; they run last."""
        ...

    def build(self, graph: StepGraph) -> Artifact:
        """Build a flat, verified graph, which is left as it is.

        Raises:
            BackendError: the backend cannot compile the graph; the message says why.
        """
        ...
