"""A backend without its device: it rewrites steps as the cuda backend does, and runs none."""

from __future__ import annotations

from mtpc.backends.base import Run
from mtpc.backends.bindings import by_default
from mtpc.backends.cuda import GpuBackend
from mtpc.backends.triton_kernels import invariantly, load_kernels, triton_bindings
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError

_REFUSAL = (
    "this backend only rewrites steps for the GPU of another machine; use backend='cuda' there to "
    "run them"
)


class CrossBackend(GpuBackend):
    """Replaces ops by the Triton kernels, for `cross.build_kernels`.

    aiter compiles its kernels itself on the device, so they are left out.

    Args:
        batch_invariant: as the option.

    Raises:
        BackendError: Triton is not installed.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        load_kernels()
        from mtpc.backends.triton_kernels.plans import early_in_few_rows

        configure = invariantly if batch_invariant else early_in_few_rows(by_default)
        super().__init__(triton_bindings(configure), "cpu", batch_invariant)

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def lower(self, graph: StepGraph) -> Run:
        """Not possible here: always raises BackendError."""
        raise BackendError(_REFUSAL)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Not possible here: always raises BackendError."""
        raise BackendError(_REFUSAL)
