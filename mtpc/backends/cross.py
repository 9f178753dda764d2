"""The backend of a machine without the device: rewrites steps as `cuda` would, and runs none."""

from __future__ import annotations

from collections import Counter

from mtpc.backends.base import Run
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import ENABLES
from mtpc.backends.triton_kernels import triton_bindings
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.passes.base import Pass

_REFUSAL = "steps are only rewritten for another machine's GPU here; backend='cuda' runs them there"


class CrossBackend:
    """Legalises to the Triton kernels, for `cross.build_kernels`.

    aiter's kernels are compiled on the device by aiter itself, so they have no part in it.

    Raises:
        BackendError: there is no Triton.
    """

    name = "cuda"
    enables: tuple[str, ...] = ENABLES
    device = "cpu"

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()
        self._bindings = triton_bindings()

    def legalise(self) -> tuple[Pass, ...]:
        """Triton kernels for the `mtpc::` ops."""
        return (BindKernels(self._bindings, self._note),)

    def lower(self, graph: StepGraph) -> Run:
        """Refused."""
        raise BackendError(_REFUSAL)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Refused."""
        raise BackendError(_REFUSAL)

    def _note(self, line: str) -> None:
        self.notes[line] += 1
