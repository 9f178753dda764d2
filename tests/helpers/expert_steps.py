"""A call of experts in a step of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpc.capture.graph import StepGraph
from mtpc.layout import Layout, StepKey
from mtpc.ops import references
from mtpc.weights.weights import Weights

BF16 = torch.bfloat16


def experts_step(name: str = "experts", **changes: Any) -> tuple[fx.Node, StepGraph]:
    """The call, and the step, whose tensors are inputs.

    Args:
        name: of the operator.
        **changes: of `given` below.
    """
    given: dict[str, Any] = dict(
        rows=32, hidden=64, inner=48, experts=6, dtype=BF16, strided=False, offset=0
    )
    sizes = {**given, **changes}
    rows, hidden, inner, experts = (sizes[n] for n in ("rows", "hidden", "inner", "experts"))
    graph, nodes = fx.Graph(), []
    width = inner if name == "relu2_experts" else 2 * inner
    with FakeTensorMode():
        values = [
            torch.empty(rows, hidden, dtype=sizes["dtype"]),
            torch.empty(experts, width, hidden, dtype=sizes["dtype"]),
            torch.empty(experts, hidden, inner, dtype=sizes["dtype"]),
            torch.empty(rows, 2, dtype=torch.int64),
            torch.empty(rows, 2),
        ]
        if sizes["strided"]:
            values[1] = torch.empty(experts, hidden, width, dtype=BF16).transpose(1, 2)
        if sizes["offset"]:
            flat = torch.empty(values[2].numel() + 9, dtype=BF16)
            values[2] = flat[sizes["offset"] :][: values[2].numel()].view(values[2].shape)
    for index, value in enumerate(values):
        nodes.append(graph.placeholder(f"argument_{index}"))
        nodes[-1].meta["val"] = value
    call = graph.call_function(references()[name], tuple(nodes))
    call.meta["val"] = values[0]
    graph.output((call,))
    module = fx.GraphModule(nn.Module(), graph)
    step = StepGraph(module, StepKey.decode(2, 3), Layout((), {}), Weights({}))
    return next(n for n in step.graph.nodes if n.op == "call_function"), step
