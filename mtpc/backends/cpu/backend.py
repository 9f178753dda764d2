"""The cpu backend: one tape per step, over tensors that all steps share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mtpc.backends.base import BATCH_INVARIANT, FUSE_SKINNY_LINEARS
from mtpc.backends.cpu.passes.fuse_head_max import FuseHeadMax
from mtpc.backends.cpu.passes.fuse_linear_chains import FuseLinearChains
from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.cpu.passes.skip_idle_rows import SkipIdleRows
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.package import Package, TapeArtifact, signature
from mtpc.backends.record_tape import fake_signature
from mtpc.backends.tape import write_tape
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.step_mode import StepMode
from mtpc.errors import OptionError
from mtpc.layout.progress import Report, silent
from mtpc.layout.specs import is_buffer_name
from mtpc.passes.base import Pass
from mtpc.passes.fuse_cache_write import FuseCacheWrite
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.pack_groups import PackBlocks, PackGroups
from mtpc.store.entries import EntryStore


@dataclass(frozen=True)
class UseCpuKernels(Pass, policy="required", name="legalise-cpu"):
    """legalise-cpu: replace the reference ops by the C++ kernels.

    Raises:
        OptionError: a pass ran that chooses operators by the number of rows. With those a row of a
            batch would be rounded otherwise than alone.
    """

    def apply(self, graph: StepGraph) -> int:
        for record in graph.history:
            if record.name in (FUSE_SKINNY_LINEARS, BATCH_INVARIANT):
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
    """Steps that are compiled ahead of time for the CPU. The graph cache keeps its kernels; without
    a store, that is the user's default cache. A line is reported while they are built.

    Raises:
        BackendError: there is no C++ compiler, or building the kernels failed.
    """

    name = "cpu"
    enables: tuple[str, ...] = (
        PackBlocks.name,
        PackGroups.name,
        PackWeights.name,
        FuseCacheWrite.name,
        FuseElementwise.name,
        FuseHeadMax.name,
        FuseLinearChains.name,
        SkipIdleRows.name,
    )
    device = "cpu"
    makes_files = True

    def __init__(self, report: Report = silent, store: EntryStore | None = None) -> None:
        load_kernels(store, report)
        self.notes: Counter[str] = Counter()

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        return (UseCpuKernels(),)

    def build(self, graph: StepGraph) -> TapeArtifact:
        """Compile a graph to a tape; see `Backend.build`.

        Raises:
            BackendError: a tape has no form for a call.
        """
        tape = write_tape(*lower_to_tape(graph)).encode()
        held = sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"})
        tensors = {name: signature(get_tensor(graph.module, name)) for name in held}
        mode = fake_mode_of(graph.graph)
        if not isinstance(mode, StepMode):
            return TapeArtifact(Package(tensors), tape)
        values = {str(n.target): n.meta["val"] for n in graph.graph.nodes if n.op == "get_attr"}
        for name in filter(is_buffer_name, held):
            tensors[name] = fake_signature(values[name])
        least = {str(symbol): number for symbol, number in mode.open_sizes.items()}
        sizes = {str(symbol): graph.layout.sizes[symbol] for symbol in graph.layout.open_sizes}
        fixed = {name: number for name, number in sizes.items() if name not in least}
        return TapeArtifact(Package(tensors, fixed, least), tape)
