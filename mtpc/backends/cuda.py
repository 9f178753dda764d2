"""The cuda backend, for NVIDIA and AMD GPUs: one device graph per step.

torch has one interface to both, named `cuda`. They differ only in `targets` and in their kernels:
aiter's kernels are for ROCm, if aiter is installed; Triton's are for both. Inductor compiles the
other ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtpc.backends.base import Run
from mtpc.backends.bindings import Binding, BindKernels, Configure, by_default
from mtpc.backends.check_device import capability_of, check_device, device_name
from mtpc.backends.expand import Function, trace_call
from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
from mtpc.backends.gpu.passes.check_invariance import CheckInvariance
from mtpc.backends.gpu.passes.fuse_draft_entry import FuseDraftEntry
from mtpc.backends.gpu.passes.fuse_skinny_linears import FuseSkinnyLinears
from mtpc.backends.gpu.passes.hold_shared import HoldShared
from mtpc.backends.gpu.passes.lower_choices import LowerChoices
from mtpc.backends.gpu.passes.merge_projections import MergeProjections
from mtpc.backends.gpu.passes.spell_collectives import SpellCollectives
from mtpc.backends.graph_artifact import GraphBackend
from mtpc.backends.graphs import ALIGNMENT, Captured, Graphs, Lower, TorchGraphs, capture_step
from mtpc.backends.kept_steps import KeptSteps, sources_digest
from mtpc.backends.measured import Table
from mtpc.backends.repeats import CutStep, cut_repeats
from mtpc.backends.torch_experts import torch_bindings
from mtpc.backends.triton_kernels import early_bindings, invariantly, load_kernels, triton_bindings
from mtpc.capture.fake_calls import map_tensors, tensors_in
from mtpc.capture.graph import StepGraph, get_tensor, operators
from mtpc.errors import BackendError
from mtpc.layout.progress import Report, silent
from mtpc.ops.collectives import is_collective
from mtpc.passes.base import Pass
from mtpc.passes.fuse_cache_write import FuseCacheWrite
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.hoist_shared import HoistShared
from mtpc.passes.pack_groups import PackGroups
from mtpc.store.entries import EntryStore

INDUCTOR = {
    # mtpc captures the whole step; Inductor's own graphs would copy its inputs.
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,
    # Rows of a product are few, and padding them to a multiple of eight is a launch of its own.
    "shape_padding": False,
}
"""Inductor's options for a step."""
RANKED = {"deterministic": True}
"""More options for several ranks: Inductor must not choose the order of a sum by measuring."""
ENABLES = (
    PackGroups.name,
    MergeProjections.name,
    FuseCacheWrite.name,
    FuseElementwise.name,
    FuseDraftEntry.name,
    FuseSkinnyLinears.name,
    SpellCollectives.name,
    LowerChoices.name,
)
"""Passes that read weights as they are stored, and leave fewer launches in a GPU's step."""


def enabled_passes(batch_invariant: bool) -> tuple[str, ...]:
    """Passes that GPU backends enable. What fuse-skinny-linears emits is not batch-invariant."""
    if not batch_invariant:
        return ENABLES
    return (*(name for name in ENABLES if name != FuseSkinnyLinears.name), BatchInvariant.name)


class GpuBackend(GraphBackend):
    """The part of a GPU backend that rewrites steps. It needs no device; "cuda" is any GPU.

    If it is `batch_invariant`, a row's numbers must not depend on how many rows a step has. The
    bindings, in order of preference, must then be configured for it (`triton_kernels.invariantly`).
    `notes` counts ops that do not run on their first kernel.
    """

    name = "cuda"
    enables: tuple[str, ...] = ENABLES

    def __init__(self, bindings: Sequence[Binding], device: str, batch_invariant: bool):
        self.enables = enabled_passes(batch_invariant)
        self._checks = (CheckInvariance(),) if batch_invariant else ()
        self._bindings, self.device = tuple(bindings), device
        self.notes: Counter[str] = Counter()

    def legalise(self) -> tuple[Pass, ...]:
        """The GPU kernels for `mtpc::` ops; Inductor compiles ATen ops.

        Passes and kernels have emitted equal calls for each layer, which are merged here.
        """
        bind = BindKernels(self._bindings, self._note)
        return (bind, HoistShared(), HoldShared(), *self._checks)

    def _note(self, line: str) -> None:
        self.notes[line] += 1


class CudaBackend(GpuBackend):
    """Steps as device graphs, which `lower` compiles and `graphs` captures; see `GpuBackend`.
    `captured` has them by name."""

    def __init__(
        self,
        graphs: Graphs,
        lower: Lower,
        bindings: Sequence[Binding],
        device: str = "cuda",
        batch_invariant: bool = False,
    ):
        super().__init__(bindings, device, batch_invariant)
        self._graphs, self._lower = graphs, lower
        self.captured: dict[str, Captured] = {}

    def keep_steps(
        self, store: EntryStore, machine: Mapping[str, str], report: Report = silent
    ) -> None:
        """From now on take what lowering makes from the graph cache, and keep it there. `machine`
        has key fields of the device and its compilers. A line is reported when another process
        lowers a step, which this one awaits."""
        self._lower = KeptSteps(store, machine, self._lower, self._note, report)

    def lower(self, graph: StepGraph) -> Run:
        return self._lower(graph)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """Capture a step as a graph; all graphs share a pool, so the largest should come first."""
        captured = capture_step(run, graph, self._graphs)
        self.captured[graph.name] = captured
        return captured.replay

    def free_bytes(self) -> int | None:
        """Bytes of device memory that the process can still get; None if it is not known."""
        return self._graphs.free_bytes()


class CrossBackend(GpuBackend):
    """Rewrites steps as `CudaBackend` does, for `cross_compile.build_kernels`, and runs none.

    aiter compiles its kernels itself on the device, so they are left out.

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
        raise BackendError(
            "this backend only rewrites steps for the GPU of another machine; use backend='cuda' "
            "there to run them"
        )


def open_cuda(
    report: Report = silent, store: EntryStore | None = None, batch_invariant: bool = False
) -> CudaBackend:
    """The backend of this machine's GPU.

    The graph cache holds the code objects of `mtpc build --target`, the autotune table and what
    Inductor makes of steps. With `batch_invariant`, kernels run by default, as the fastest ones may
    differ with the number of rows, and aiter's choose by rows themselves.

    Raises:
        BackendError: torch finds no GPU, or Triton is not installed; the message says which.
    """
    from mtpc.backends.aiter import aiter_bindings

    check_device()
    bindings: list[Binding] = []
    if torch.version.hip and not batch_invariant:
        found = aiter_bindings()
        bindings += found.bindings
        report(found.message)
    # Imported after the check, so that a machine without a GPU gets the message about the GPU.
    from mtpc.backends.triton_kernels.crosscompile import triton_fields
    from mtpc.backends.triton_kernels.launch import device_target
    from mtpc.backends.triton_kernels.loading import CodeObjects, loaded_bindings
    from mtpc.backends.triton_kernels.plans import early_in_few_rows
    from mtpc.backends.triton_kernels.trial import DeviceTimer
    from mtpc.backends.triton_kernels.tuning import Tuner

    device, target = torch.device("cuda", torch.cuda.current_device()), device_target()
    objects = CodeObjects(store, target) if store and target else None
    configure: Configure = invariantly
    if not batch_invariant:
        table = Table(store, device_name(device), report)
        timer = DeviceTimer(device, TorchGraphs(device), objects)
        tuner = Tuner(table, timer)
        prefers = partial(tuner.prefers, timer.whole)
        bindings += torch_bindings(capability_of(device), prefers)
        configure = early_in_few_rows(tuner)
    bindings += loaded_bindings(objects, configure)
    if not batch_invariant and target and target.begins_early:
        bindings += early_bindings(configure)
    bindings += triton_bindings(configure)
    graphs = TorchGraphs(device)
    backend = CudaBackend(graphs, lower_by_inductor, bindings, str(device), batch_invariant)
    if store is not None:
        machine = {"device": device_name(device), **triton_fields()}
        backend.keep_steps(store, machine, report)
    return backend


def lower_by_inductor(graph: StepGraph) -> Run:
    """Compile a step with Inductor; its tensors become arguments that it mutates in place.

    Parts that repeat, such as layers, are compiled once and called several times.

    Raises:
        BackendError: Inductor cannot compile the graph.
    """
    step = cut_step(graph)
    try:
        compiled = [compile_flat(*made, options_of(graph)) for made in step.modules()]
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        raise BackendError(f"Inductor could not compile {graph.name}: {error}") from error
    run_all = step.run_of(compiled)

    def run() -> None:
        with torch.no_grad():
            run_all()

    return run


def cut_step(graph: StepGraph) -> CutStep:
    """The segments of a step that Inductor compiles."""
    module, tensors = lift_tensors(graph)
    return cut_repeats(module.graph, tensors)


def options_of(graph: StepGraph) -> dict[str, Any]:
    """Inductor's options for a step."""
    is_ranked = any(is_collective(target) for _, target in operators(graph.graph))
    return {**INDUCTOR, **(RANKED if is_ranked else {})}


class _SourcesInKeys(CustomGraphPass):
    """Changes no graph, and puts mtpc's sources into the keys of torch's caches.

    AOTAutograd looks up a graph before it sees into mtpc's operators, so that its own key has their
    names, and not their kernels.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> str:
        return sources_digest()


def compile_flat(
    module: fx.GraphModule, tensors: Sequence[Tensor], options: Mapping[str, Any] = INDUCTOR
) -> Callable[..., Any]:
    """Compile a module that takes such tensors with Inductor, through Inductor's own cache. Of fake
    tensors only the form counts.

    That cache only serves compilations with a shape environment. torch.compile has one; for a
    direct call of Inductor this function makes one. No size becomes symbolic.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [_fake_like(mode, tensor) for tensor in tensors]
    with torch.no_grad(), tracing(TracingContext(mode)):
        compiled: Callable[..., Any] = torch._inductor.compile(
            module, [*fakes], options={**options, "post_grad_custom_pre_pass": _SourcesInKeys()}
        )
    return compiled


def compile_call(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """A call of a function, as `trace_call` takes it, as Inductor compiles it within a step. Each
    run reads the arguments."""
    mode, given = FakeTensorMode(), (args, dict(kwargs))
    tensors = tensors_in(given)
    fakes = map_tensors(mode.from_tensor, given)
    compiled = compile_flat(trace_call(mode, function, *fakes), tensors)
    return partial(compiled, *tensors)


def _fake_like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor of the same form. For a part of a larger storage, such as a packed result, it
    has a storage of its own: parts do not overlap, so a step may treat them as separate."""
    if not isinstance(tensor, FakeTensor):
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        if not is_part or tensor.data_ptr() % ALIGNMENT:
            return mode.from_tensor(tensor, static_shapes=True)
    size, stride = tensor.shape, tensor.stride()
    with mode:
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


def lift_tensors(graph: StepGraph) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a flat graph that takes every buffer and weight as an argument; and the tensors.

    If a tensor were an attribute, Inductor could copy it into the code or fold it into a constant.
    """
    copy = graph.clone()
    tensors: list[Tensor] = []
    attributes = [node for node in copy.graph.nodes if node.op == "get_attr"]
    first = next(iter(copy.graph.nodes))
    for index, node in enumerate(attributes):
        tensors.append(get_tensor(graph.module, str(node.target)).detach())
        with copy.graph.inserting_before(first):
            placeholder = copy.graph.placeholder(f"tensor_{index}")
        placeholder.meta = dict(node.meta)
        node.replace_all_uses_with(placeholder)
    for node in attributes:
        copy.graph.erase_node(node)
    return fx.GraphModule(torch.nn.Module(), copy.graph), tensors
