"""A backend without its device: it rewrites steps as the cuda backend does, and runs none."""

from __future__ import annotations

from collections import Counter

from mtpc.backends.base import Run
from mtpc.backends.bindings import BindKernels, by_default
from mtpc.backends.cuda import ENABLES, enabled_passes
from mtpc.backends.invariance import CheckInvariance
from mtpc.backends.triton_kernels import invariantly, load_kernels, triton_bindings
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.passes.base import Pass

_REFUSAL = (
    "this backend only rewrites steps for the GPU of another machine; use backend='cuda' there to "
    "run them"
)


class CrossBackend:
    """Replaces ops by the Triton kernels, for `cross.build_kernels`.

    aiter compiles its kernels itself on the device, so they are left out.

    Args:
        batch_invariant: as the option.

    Raises:
        BackendError: Triton is not installed.
    """

    name = "cuda"
    enables: tuple[str, ...] = ENABLES
    device = "cpu"
    package = None

    def __init__(self, batch_invariant: bool = False) -> None:
        self.notes: Counter[str] = Counter()
        self.enables = enabled_passes(batch_invariant)
        load_kernels()
        from mtpc.backends.triton_kernels.plans import early_in_few_rows

        configure = invariantly if batch_invariant else early_in_few_rows(by_default)
        self._bindings = triton_bindings(configure)
        self._checks = (CheckInvariance(),) if batch_invariant else ()

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        """Triton kernels for the `mtpc::` ops."""
        return (BindKernels(self._bindings, self._note), *self._checks)

    def lower(self, graph: StepGraph) -> Run:
        """Not possible here: always raises BackendError."""
        raise BackendError(_REFUSAL)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Not possible here: always raises BackendError."""
        raise BackendError(_REFUSAL)

    def _note(self, line: str) -> None:
        self.notes[line] += 1
