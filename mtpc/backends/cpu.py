"""The cpu backend: one AOTInductor package per step, without weights, over shared tensors.

Weights and state are bound as user-managed constants: they exist once, whatever the number of
buckets, and state is mutated in place. Buffers that only the host writes become inputs of the
package instead, because Inductor copies small constants into the code it generates, where later
writes would not be seen.
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
from mtpc.passes.base import Pass
from mtpc.store.entries import EntryStore
from mtpc.store.machine import cpu_flags

_INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,
    # Inductor recomputes cheap expressions in every consumer; metadata and rotary angles have as
    # many consumers as the model has layers. A low threshold stores them once: half the code.
    "realize_opcount_threshold": 8,
    # A fused loop would keep in float32 what the graph says is bfloat16, and what is fused differs
    # between graphs: plain decoding and speculation would round differently.
    "emulate_precision_casts": True,
    # A loop is given to several threads from this many elements a thread on. At Inductor's 512, a
    # norm of a single row is split where several rows are not, and adds up in another order.
    "cpp.min_chunk_size": 16384,
}
_INLINED_ELEMENTS = 8
"""Inductor writes one-dimensional constants of up to this many elements into its code."""
_LIBRARY_MEMBER, _CALLS_MEMBER = ".wrapper.so", ".wrapper.json"
"""How the names of what a running package needs end in AOTInductor's archive."""


@dataclass(frozen=True)
class UseCpuKernels:
    """legalise-cpu: call the C++ kernels in place of the reference ops."""

    name: ClassVar[str] = "legalise-cpu"

    def apply(self, graph: StepGraph) -> int:
        table = kernel_table()
        rewrites = 0
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in table:
                node.target = table[node.target]
                rewrites += 1
        return rewrites


class CpuBackend:
    """Ahead-of-time compiled steps on the CPU.

    Args:
        report: hears of the kernels being built.
        store: the graph cache, where the kernels are kept; by default the user's.

    Raises:
        BackendError: no C++ compiler, or building the kernels failed.
    """

    name = "cpu"
    enables: tuple[str, ...] = (
        "pack-weights",
        "fuse-cache-write",
        "fuse-elementwise",
        "fuse-head-max",
        "fuse-linear-chains",
        "skip-idle-rows",
    )
    device = "cpu"

    def __init__(self, report: Report = lambda line: None, store: EntryStore | None = None) -> None:
        load_kernels(store, report)
        self.notes: Counter[str] = Counter()
        self._scratch = tempfile.TemporaryDirectory(prefix="mtpc-packages-")

    def legalise(self) -> tuple[Pass, ...]:
        """C++ kernels for the `mtpc::` ops; ATen goes to Inductor."""
        return (UseCpuKernels(),)

    def lower(self, graph: StepGraph) -> Run:
        """Compile to a package of this process, open it, bind the tensors."""
        directory = Path(tempfile.mkdtemp(prefix=graph.name, dir=self._scratch.name))
        package = self.package(graph, directory)
        return open_package(directory, package, partial(get_tensor, graph.module))

    def package(self, graph: StepGraph, directory: Path) -> Package:
        """Compile to files that outlive this process.

        Args:
            graph: flat and verified.
            directory: gets `package.LIBRARY`, and `package.CALLS` where there are any.

        Returns:
            How to call them.

        Raises:
            BackendError: AOTInductor refuses the graph.
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
        """A package is already fixed work on fixed addresses."""
        return run

    def _compile(self, name: str, module: fx.GraphModule, inputs: Iterable[Tensor]) -> Path:
        """AOTInductor's archive of a graph."""
        path = Path(self._scratch.name) / f"{name}.pt2"
        try:
            settings = compile_settings()
            with torch.no_grad(), warnings.catch_warnings():
                # torch's own code, on its own data structures.
                warnings.filterwarnings("ignore", message=".*treespec.*")
                program = torch.export.export(module, tuple(inputs), strict=False)
                _drop_assertions(program.graph)
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs=settings
                )
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            raise BackendError(
                f"AOTInductor could not compile {name}: {error}; `mtpc doctor` checks the "
                "compiler, backend='eager' runs without one"
            ) from error
        return path


def compile_settings() -> dict[str, object]:
    """Inductor's settings; with its choice of instructions where `MTPC_CPU_LEVEL` names a level.

    Raises:
        BackendError: this torch generates code for the processor at hand only.
    """
    settings = {**_INDUCTOR, "aot_inductor.custom_ops_to_c_shims": direct_calls()}
    if cpu_level() is None:
        return settings
    if not hasattr(torch._inductor.config.cpp, "march"):
        raise BackendError(
            f"MTPC_CPU_LEVEL is set, but torch {torch.__version__} compiles for the processor at "
            "hand only: unset it, or install torch 2.13"
        )
    level = chosen_level(cpu_flags())
    # One lane is what Inductor calls code without explicit vectors.
    lanes = level.vector_bits if level.vector_bits > 128 else 1
    return {**settings, "cpp.march": level.march, "cpp.simdlen": lanes}


def _drop_assertions(graph: fx.Graph) -> None:
    """Without the dtype assertions that export adds beside casts.

    The graph was verified before it came here, and lowering in torch 2.11 trips over one of them
    (glm4_moe, "Expected: torch.float32, Got: torch.int64") although the casts are right.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def _lift_inputs(graph: StepGraph) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """A copy of the graph in which what Inductor would inline is an input."""
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
    # Placeholders were each put first: give inputs the order in which the graph lists them.
    ordered = dict(reversed(inputs.items()))
    return fx.GraphModule(graph.module, copy.graph), ordered


def _must_be_input(graph: StepGraph, name: str) -> bool:
    """Of what the step does not write: what the host writes, and what Inductor would inline."""
    if name in graph.layout and graph.layout[name].writer == "host":
        return True
    tensor = get_tensor(graph.module, name)
    return tensor.dim() <= 1 and tensor.numel() <= _INLINED_ELEMENTS
