"""Cuts a flat step as servers do: the target's pass, then each draft's, one launch each.

The parts have the operators of the fused step in the same order, so that a comparison shows the
gain of one graph. Values that later parts use stay in place, as in static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from mtpc.backends.base import Run
from mtpc.backends.graphs import WARM_UPS, Graphs, empty_batch
from mtpc.capture.graph import StepGraph, get_tensor

Values = dict[str, Tensor]
Compiled = Callable[..., "tuple[Tensor, ...]"]
CompilePart = Callable[[fx.GraphModule, list[Tensor]], Compiled]


@dataclass(frozen=True)
class Part:
    """Some adjacent nodes of a step.

    Attributes:
        module: takes tensors, returns a tuple.
        inputs: what it takes, by name: attributes of the step, or outputs of earlier parts.
        outputs: what it returns, by name.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def cut_step(graph: StepGraph) -> list[Part]:
    """Cut a flat step into parts that run in order.

    A part begins where a draft step uses an MTP layer's first matrix (its norms may be computed
    once for all, ahead of that), and ends before the next: K + 1 parts.
    """
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    starts = [0, *_draft_starts(nodes), len(nodes)]
    groups = [nodes[begin:end] for begin, end in pairwise(starts)]
    return [_part(group) for group in groups]


def _draft_starts(nodes: list[fx.Node]) -> Iterator[int]:
    """Indices of the nodes by which each pass through a layer begins."""
    firsts: dict[str, str] = {}
    for index, node in enumerate(nodes):
        for attribute in (n for n in node.all_input_nodes if n.op == "get_attr"):
            name, is_matrix = str(attribute.target), attribute.meta["val"].dim() > 1
            layer = ".".join(name.split(".")[:2])
            if is_matrix and name.startswith("mtp.") and firsts.setdefault(layer, name) == name:
                yield index


def _part(nodes: list[fx.Node]) -> Part:
    inside, end = set(nodes), nodes[0].graph.output_node()
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = [n for n in nodes if n.users.keys() - inside - {end}]
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"input_{index}")
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    module = fx.GraphModule(nn.Module(), graph)
    return Part(module, tuple(map(_name, inputs)), tuple(map(_name, outputs)))


def _name(node: fx.Node) -> str:
    """Of an attribute its own, of a value its node's."""
    return str(node.target) if node.op == "get_attr" else f"%{node.name}"


class PiecewiseStep:
    """A step that runs as its parts.

    Args:
        graph: flat, bound to the machine's kernels.
        compile_part: compiles one part for inputs like these.

    Attributes:
        num_parts: launches of an iteration.
    """

    def __init__(self, graph: StepGraph, compile_part: CompilePart):
        self._graph, self._calls = graph, list[tuple[Compiled, Part]]()
        parts, values = cut_step(graph), Values()
        with torch.no_grad(), empty_batch(graph):
            for part in parts:
                inputs = self._gather(part, values)
                compiled = compile_part(part.module, inputs)
                self._calls.append((compiled, part))
                values.update(zip(part.outputs, compiled(*inputs), strict=True))
        self.num_parts = len(parts)

    def run(self) -> None:
        """Launch every part; nothing is captured."""
        values = Values()
        for index in range(self.num_parts):
            self._run_part(index, values)

    def capture(self, graphs: Graphs) -> Run:
        """Every part as a graph of its own, all in one pool; returns the replay of them all."""
        values = Values()
        with empty_batch(self._graph):
            for _ in range(WARM_UPS):
                graphs.warm_up(self.run)
            # In order: what a part made while it was captured is what the next one reads.
            runs = [partial(self._run_part, index, values) for index in range(self.num_parts)]
            replays = [graphs.record(run) for run in runs]

        def replay() -> None:
            for one in replays:
                one()

        return replay

    def _run_part(self, index: int, values: Values) -> None:
        compiled, part = self._calls[index]
        with torch.no_grad():
            outputs = compiled(*self._gather(part, values))
        values.update(zip(part.outputs, outputs, strict=True))

    def _gather(self, part: Part, values: Values) -> list[Tensor]:
        return [
            values[name] if name.startswith("%") else get_tensor(self._graph.module, name).detach()
            for name in part.inputs
        ]
