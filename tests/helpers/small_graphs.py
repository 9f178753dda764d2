"""Graphs of a few operators, and the contract of every pass on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.layout import BufferSpec, Layout, StepKey
from mtpc.passes import Pass, Verifier, run_pipeline
from mtpc.passes.fuse_draft_chain import FuseDraftChain
from mtpc.weights.weights import Weights


class Function(nn.Module):
    """A function of tensors as a leaf piece."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def small_graph(function: Callable[..., Any], **tensors: Tensor) -> StepGraph:
    """A flat StepGraph of `function(*tensors)`, which must write `batch.out` (a buffer).

    Tensors named `batch_*` and `kv_*` are buffers, the others weights. In buffer names, a dot
    replaces the first underscore.
    """
    named = {
        (n.replace("_", ".", 1) if n.startswith(("batch_", "kv_")) else n): t
        for n, t in tensors.items()
    }
    buffers = {n: t for n, t in named.items() if n.startswith(("batch.", "kv."))}
    module, graph = nn.Module(), fx.Graph()
    for name, tensor in named.items():
        set_tensor(module, name, tensor)
    module.add_module("pieces", nn.Module())
    module.pieces.add_module("body", Function(function))  # type: ignore[operator]
    graph.call_module("pieces.body", tuple(graph.get_attr(name) for name in named))
    graph.output(())
    layout = Layout([BufferSpec(n, tuple(t.shape), t.dtype) for n, t in buffers.items()], {})
    weights = Weights({n: t for n, t in named.items() if n not in buffers})
    step = StepGraph(fx.GraphModule(module, graph), StepKey.decode(1, 0), layout, weights)
    names = {id(t): n for n, t in buffers.items()}
    run_pipeline(step, (FuseDraftChain(names),), Verifier(propagate=True))
    return step


def run(graph: StepGraph) -> Tensor:
    """Run the graph; returns `batch.out`."""
    graph.buffer("batch.out").fill_(-7)
    graph.module.recompile()
    graph.module()
    return graph.buffer("batch.out").clone()


def check_pass(
    graph: StepGraph, step: Pass, before: str, after: str, rewrites: int, exact: bool = True
) -> None:
    """Check the contract of every pass."""
    assert operations(graph) == before.split()
    expected = run(graph)
    history = len(graph.history)
    run_pipeline(graph, (step,), Verifier(propagate=True))
    assert graph.history[history].rewrites == rewrites
    assert operations(graph) == after.split()
    found = run(graph)
    if exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    text = graph.text()
    assert step.apply(graph) == 0, "a second run must find nothing"
    assert graph.text() == text


def operations(graph: StepGraph) -> list[str]:
    """Operators in order, with the shape of their result: `linear[2,5]`."""
    out = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]
            shape = ",".join(map(str, value.shape)) if isinstance(value, Tensor) else ""
            name = getattr(node.target, "overloadpacket", node.target).__name__
            out.append(f"{name}[{shape}]")
    return out
