"""The cuda backend, for NVIDIA and AMD GPUs: Inductor and our kernels inside one graph a step.

torch has one interface to both, named `cuda`. What differs stands in `targets` and in the table
of kernels: aiter's where this is ROCm and aiter is installed, Triton's everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtpc.backends.base import Report, Run
from mtpc.backends.bindings import Binding, BindKernels
from mtpc.backends.graphs import Captured, Graphs, Lower, TorchGraphs, capture_step
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.errors import BackendError
from mtpc.passes.base import Pass
from mtpc.store.entries import EntryStore

INDUCTOR = {
    # We capture the whole step ourselves; Inductor's graphs would copy its inputs.
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,
}
"""Inductor's options for a step."""


ENABLES = ("fuse-cache-write",)
"""Passes, off by default, that pay on a GPU."""


class CudaBackend:
    """Steps as device graphs.

    Args:
        graphs: what captures.
        lower: what compiles.
        bindings: kernels for the `mtpc::` ops, in order of preference.
        device: where the model and its buffers must be; "cuda" alone is any GPU.

    Attributes:
        notes: ops that run on another kernel than the first of their candidates, counted.
        captured: what was captured, by the step's name.
    """

    name = "cuda"
    enables: tuple[str, ...] = ENABLES

    def __init__(
        self, graphs: Graphs, lower: Lower, bindings: Sequence[Binding], device: str = "cuda"
    ):
        self._graphs, self._lower, self._bindings = graphs, lower, tuple(bindings)
        self.device = device
        self.notes: Counter[str] = Counter()
        self.captured: dict[str, Captured] = {}

    def legalise(self) -> tuple[Pass, ...]:
        """aiter's and our kernels; ATen goes to Inductor."""
        return (BindKernels(self._bindings, self._note),)

    def lower(self, graph: StepGraph) -> Run:
        """Compile for the device."""
        return self._lower(graph)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """One graph per step, all in one pool; the compiler comes with the largest bucket first."""
        captured = capture_step(run, graph, self._graphs)
        self.captured[graph.name] = captured
        return captured.replay

    def free_bytes(self) -> int | None:
        """Device memory that is still to be had; None where nobody counts it."""
        return self._graphs.free_bytes()

    def _note(self, line: str) -> None:
        self.notes[line] += 1


def open_cuda(report: Report = lambda line: None, store: EntryStore | None = None) -> CudaBackend:
    """The backend of this machine's GPU.

    Args:
        report: hears what was found.
        store: the graph cache, where `mtpc build --target` left code objects, and where the
            autotune table is.

    Raises:
        BackendError: there is no GPU that torch can use, or no Triton; the message says which.
    """
    from mtpc.backends.aiter import aiter_bindings

    check_device()
    # Imported after the check: the message on a missing GPU should not be one on Triton.
    from mtpc.backends.triton_kernels.limits import triton_bindings

    bindings: list[Binding] = []
    if torch.version.hip:
        found = aiter_bindings()
        bindings += found.bindings
        report(found.message)
    from mtpc.backends.triton_kernels.loading import CodeObjects, device_target, loaded_bindings
    from mtpc.backends.triton_kernels.trial import DeviceTimer, device_name
    from mtpc.backends.triton_kernels.tuning import Tuner

    device, target = torch.device("cuda", torch.cuda.current_device()), device_target()
    objects = CodeObjects(store, target) if store and target else None
    tuner = Tuner(store, device_name(device), DeviceTimer(device, objects), report)
    bindings += loaded_bindings(objects, tuner)
    bindings += triton_bindings(tuner)
    graphs = TorchGraphs(device)
    return CudaBackend(graphs, lower_by_inductor, bindings, str(device))


def check_device() -> None:
    """Refuse a machine or a torch without GPU.

    Raises:
        BackendError: with what was found and what to install.
    """
    if torch.cuda.is_available():
        return
    hip, cuda = torch.version.hip, torch.version.cuda
    if not (hip or cuda):
        raise BackendError(
            f"backend 'cuda' needs a GPU, and this torch ({torch.__version__}) is built for the "
            "CPU only; install a torch built for CUDA or ROCm (docs/gpu.md), or use backend='cpu'. "
            "`mtpc build --target` compiles kernels for a GPU elsewhere"
        )
    built = f"ROCm {hip}" if hip else f"CUDA {cuda}"
    raise BackendError(
        f"backend 'cuda' needs a GPU; this torch is built for {built} and finds none. Check that "
        f"`{'rocminfo' if hip else 'nvidia-smi'}` lists one and that this user may open it"
    )


def lower_by_inductor(graph: StepGraph) -> Run:
    """Compile a step with Inductor; tensors become arguments that are mutated in place.

    Raises:
        BackendError: Inductor refuses the graph.
    """
    module, tensors = lift_tensors(graph)
    try:
        compiled = compile_flat(module, tensors)
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        raise BackendError(f"Inductor could not compile {graph.name}: {error}") from error

    def run() -> None:
        with torch.no_grad():
            compiled(*tensors)

    return run


def compile_flat(module: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Inductor's code for a module that takes these tensors; Inductor keeps it in its own cache.

    That cache takes only what is compiled under a shape environment, which torch.compile has and
    a plain call of Inductor has not. Sizes are those of the tensors: none is made symbolic.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    with torch.no_grad(), tracing(TracingContext(mode)):
        compiled: Callable[..., Any] = torch._inductor.compile(
            module, [*fakes], options=dict(INDUCTOR)
        )
    return compiled


def lift_tensors(graph: StepGraph) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a flat graph that takes every buffer and weight as an argument, and the tensors.

    As an attribute, a tensor could be copied into the code or folded into a constant.
    """
    copy = graph.clone()
    tensors: list[Tensor] = []
    attributes = [node for node in copy.graph.nodes if node.op == "get_attr"]
    first = next(iter(copy.graph.nodes))
    for index, node in enumerate(attributes):
        tensors.append(get_tensor(graph.module, str(node.target)).detach())
        with copy.graph.inserting_before(first):
            placeholder = copy.graph.placeholder(f"tensor_{index}")
        node.replace_all_uses_with(placeholder)
    for node in attributes:
        copy.graph.erase_node(node)
    for node in list(copy.graph.nodes):
        # Export's assertions beside casts: verified already, and Inductor trips over one of them.
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            copy.graph.erase_node(node)
    return fx.GraphModule(torch.nn.Module(), copy.graph), tensors
