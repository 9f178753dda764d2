"""The cpu backend: one AOTInductor package per step, without weights, over shared tensors.

Weights and state are bound as user-managed constants, so all buckets share them and steps mutate
state in place. Buffers that only the host writes are inputs of the package instead: Inductor copies
small constants into the generated code, which would not see later writes.
"""

from __future__ import annotations

import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, fx

from mtpc.backends.base import Report, Run
from mtpc.backends.cpu_kernels import direct_calls, kernel_table, load_kernels
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.backends.package import CALLS, LIBRARY, Package, open_package, signature
from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.config import cpu_level
from mtpc.errors import BackendError
from mtpc.passes.base import Pass, Policy
from mtpc.passes.fuse_cache_write import FuseCacheWrite
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.fuse_head_max import FuseHeadMax
from mtpc.passes.fuse_linear_chains import FuseLinearChains
from mtpc.passes.pack_weights import PackWeights
from mtpc.passes.skip_idle_rows import SkipIdleRows
from mtpc.store.entries import EntryStore
from mtpc.store.machine import cpu_flags
from mtpc.store.scratch import Scratch

_INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,
    # Inductor recomputes cheap expressions in every consumer. Metadata and rotary angles have as
    # many consumers as the model has layers. A low threshold stores them once and halves the code.
    "realize_opcount_threshold": 8,
    # A fused loop would keep bfloat16 values of the graph in float32. Graphs fuse differently, so
    # plain decoding and speculation would round differently.
    "emulate_precision_casts": True,
    # The smallest number of elements per thread for which a loop uses several threads. With
    # Inductor's 512, the norm of a single row is split, and several rows are not, so that they add
    # in another order.
    "cpp.min_chunk_size": 16384,
}
_INLINED_ELEMENTS = 8
"""Inductor copies one-dimensional constants of up to this many elements into its code."""
_LIBRARY_MEMBER, _CALLS_MEMBER = ".wrapper.so", ".wrapper.json"
"""Endings of the two files in AOTInductor's archive that a package needs to run."""


@dataclass(frozen=True)
class UseCpuKernels:
    """legalise-cpu: replace the reference ops by the C++ kernels."""

    name: ClassVar[str] = "legalise-cpu"
    policy: ClassVar[Policy] = "required"

    def apply(self, graph: StepGraph) -> int:
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
        PackWeights.name,
        FuseCacheWrite.name,
        FuseElementwise.name,
        FuseHeadMax.name,
        FuseLinearChains.name,
        SkipIdleRows.name,
    )
    device = "cpu"

    def __init__(self, report: Report = lambda line: None, store: EntryStore | None = None) -> None:
        load_kernels(store, report)
        self.notes: Counter[str] = Counter()
        self._scratch = Scratch("packages")

    def free_bytes(self) -> int | None:
        """Host memory is not planned ahead."""
        return None

    def legalise(self) -> tuple[Pass, ...]:
        """The C++ kernels for `mtpc::` ops; Inductor compiles ATen ops."""
        return (UseCpuKernels(),)

    def lower(self, graph: StepGraph) -> Run:
        """Compile to a temporary package, open it, and bind the graph's tensors."""
        directory = Path(tempfile.mkdtemp(prefix=graph.name, dir=self._scratch.name))
        package = self.package(graph, directory)
        return open_package(directory, package, partial(get_tensor, graph.module))

    def package(self, graph: StepGraph, directory: Path) -> Package:
        """Compile a graph to the files of a package.

        Args:
            graph: flat and verified.
            directory: where to write `package.LIBRARY` and, if the package needs it,
                `package.CALLS`.

        Returns:
            How to call the package.

        Raises:
            BackendError: AOTInductor cannot compile the graph.
        """
        lifted, inputs = _lift_inputs(graph)
        held = {str(node.target) for node in lifted.graph.nodes if node.op == "get_attr"}
        archive = self._compile(graph.name, lifted, inputs.values())
        with zipfile.ZipFile(archive) as files:
            (library,) = (m for m in files.namelist() if m.endswith(_LIBRARY_MEMBER))
            (directory / LIBRARY).write_bytes(files.read(library))
            calls = [m for m in files.namelist() if m.endswith(_CALLS_MEMBER)]
            if calls:
                (member,) = calls
                (directory / CALLS).write_bytes(files.read(member))
        tensors = inputs | {name: get_tensor(graph.module, name) for name in sorted(held)}
        return Package(tuple(inputs), {name: signature(t) for name, t in tensors.items()})

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """No capture: a package already is fixed work on fixed addresses."""
        return run

    def _compile(self, name: str, module: fx.GraphModule, inputs: Iterable[Tensor]) -> Path:
        """Compile a graph with AOTInductor; returns the path of its archive."""
        path = Path(self._scratch.name) / f"{name}.pt2"
        try:
            settings = compile_settings()
            with torch.no_grad(), warnings.catch_warnings():
                # The warning is about torch's own code.
                warnings.filterwarnings("ignore", message=".*treespec.*")
                program = torch.export.export(module, tuple(inputs), strict=False)
                _drop_assertions(program.graph)
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs=settings
                )
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            raise BackendError(
                f"AOTInductor could not compile {name}: {error}; check the compiler with `mtpc "
                "doctor`, or use backend='eager', which needs none"
            ) from error
        return path


def compile_settings() -> dict[str, object]:
    """Inductor's settings, including the instruction set if `MTPC_CPU_LEVEL` names a level.

    Raises:
        BackendError: a level is named, but this torch generates code for this processor only.
    """
    settings = {**_INDUCTOR, "aot_inductor.custom_ops_to_c_shims": direct_calls()}
    if cpu_level() is None:
        return settings
    if not hasattr(torch._inductor.config.cpp, "march"):
        raise BackendError(
            f"MTPC_CPU_LEVEL is set, and torch {torch.__version__} compiles for this processor "
            "only; unset MTPC_CPU_LEVEL, or install torch 2.13"
        )
    level = chosen_level(cpu_flags())
    # To Inductor, one lane means code without explicit vectors.
    lanes = level.vector_bits if level.vector_bits > 128 else 1
    return {**settings, "cpp.march": level.march, "cpp.simdlen": lanes}


def _drop_assertions(graph: fx.Graph) -> None:
    """Remove the dtype assertions that torch.export adds beside casts.

    The verifier has checked the dtypes. torch 2.11 fails to lower one of the assertions (glm4_moe,
    "Expected: torch.float32, Got: torch.int64") although the casts are right.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def _lift_inputs(graph: StepGraph) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """A copy of the graph with inputs for tensors that Inductor must not copy into code.

    Returns the copy, and the tensors by name in the order of the inputs.
    """
    copy = graph.clone()
    inputs: dict[str, Tensor] = {}
    written = frozenset().union(*analyse(copy.graph).writes.values())
    for node in list(copy.graph.nodes):
        name = str(node.target)
        if node.op == "get_attr" and name not in written and _must_be_input(graph, name):
            tensor = get_tensor(graph.module, name).detach()
            with copy.graph.inserting_before(next(iter(copy.graph.nodes))):
                placeholder = copy.graph.placeholder(f"host_{len(inputs)}")
            node.replace_all_uses_with(placeholder)
            copy.graph.erase_node(node)
            inputs[name] = tensor
    # Each placeholder was inserted before the others, so the graph has them in reverse order.
    ordered = dict(reversed(inputs.items()))
    return fx.GraphModule(graph.module, copy.graph), ordered


def _must_be_input(graph: StepGraph, name: str) -> bool:
    """Whether a tensor that the step does not write must be an input.

    It must if the host writes it, or if Inductor would copy it into the code.
    """
    if name in graph.layout and graph.layout[name].is_host_only:
        return True
    tensor = get_tensor(graph.module, name)
    return tensor.dim() <= 1 and tensor.numel() <= _INLINED_ELEMENTS
