"""The cpu backend: one tape per step, over tensors that all steps share."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from mtpc.backends.base import Run
from mtpc.backends.cpu.passes.fuse_head_max import FuseHeadMax
from mtpc.backends.cpu.passes.fuse_linear_chains import FuseLinearChains
from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.cpu.passes.skip_idle_rows import SkipIdleRows
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
from mtpc.backends.gpu.passes.fuse_skinny_linears import FuseSkinnyLinears
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.package import TAPE, Package, open_package, signature
from mtpc.backends.record_tape import fake_signature
from mtpc.backends.tape import write_tape
from mtpc.capture.graph import StepGraph, get_tensor, is_buffer_name
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.step_mode import StepMode
from mtpc.errors import OptionError
from mtpc.layout.progress import Report, silent
from mtpc.passes.base import Pass, Policy
from mtpc.passes.fuse_cache_write import FuseCacheWrite
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.pack_groups import PackGroups
from mtpc.store.entries import EntryStore
from mtpc.store.scratch import Scratch


@dataclass(frozen=True)
class UseCpuKernels:
    """legalise-cpu: replace the reference ops by the C++ kernels.

    Raises:
        OptionError: a pass ran that chooses operators by the number of rows. With those a row of a
            batch would be rounded otherwise than alone.
    """

    name: ClassVar[str] = "legalise-cpu"
    policy: ClassVar[Policy] = "required"

    def apply(self, graph: StepGraph) -> int:
        for record in graph.history:
            if record.name in (FuseSkinnyLinears.name, BatchInvariant.name):
                raise OptionError(
                    f"pass {record.name!r} is for GPUs: on a CPU no kernel takes what it makes, "
                    "and text would depend on K; leave it out of enabled_passes"
                )
        table = kernel_table()
        rewrites = 0
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in table:
                node.target = table[node.target]
                rewrites += 1
        return rewrites


class CpuBackend:
    """Steps that are compiled ahead of time for the CPU.

    Args:
        report: is called with a line while the kernels are built.
        store: the graph cache that keeps the kernels; None is the user's default cache.

    Raises:
        BackendError: there is no C++ compiler, or building the kernels failed.
    """

    name = "cpu"
    enables: tuple[str, ...] = (
        PackGroups.name,
        PackWeights.name,
        FuseCacheWrite.name,
        FuseElementwise.name,
        FuseHeadMax.name,
        FuseLinearChains.name,
        SkipIdleRows.name,
    )
    device = "cpu"

    def __init__(self, report: Report = silent, store: EntryStore | None = None) -> None:
        load_kernels(store, report)
        self.notes: Counter[str] = Counter()
        self._scratch = Scratch("packages")

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        """The C++ kernels for `mtpc::` ops."""
        return (UseCpuKernels(),)

    def lower(self, graph: StepGraph) -> Run:
        """Compile to a temporary package, open it, and bind the graph's tensors."""
        directory = Path(tempfile.mkdtemp(prefix=graph.name, dir=self._scratch.name))
        with self._scratch.filled():
            package = self.package(graph, directory)
        sizes = {str(symbol): number for symbol, number in graph.layout.sizes.items()}
        return open_package(directory, package, partial(get_tensor, graph.module), sizes)

    def package(self, graph: StepGraph, directory: Path) -> Package:
        """Compile a graph to the files of a package.

        Args:
            graph: flat and verified.
            directory: where to write `package.TAPE`.

        Returns:
            What the package is bound to.

        Raises:
            BackendError: a tape has no form for a call.
        """
        (directory / TAPE).write_text(write_tape(*lower_to_tape(graph)))
        held = sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"})
        tensors = {name: signature(get_tensor(graph.module, name)) for name in held}
        mode = fake_mode_of(graph.graph)
        if not isinstance(mode, StepMode):
            return Package(tensors)
        values = {str(n.target): n.meta["val"] for n in graph.graph.nodes if n.op == "get_attr"}
        for name in filter(is_buffer_name, held):
            tensors[name] = fake_signature(values[name])
        least = {str(symbol): number for symbol, number in mode.open_sizes.items()}
        sizes = {str(symbol): graph.layout.sizes[symbol] for symbol in graph.layout.open_sizes}
        fixed = {name: number for name, number in sizes.items() if name not in least}
        return Package(tensors, fixed, least)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """No capture: a package already is fixed work on fixed addresses."""
        return run
