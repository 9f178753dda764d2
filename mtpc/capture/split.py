"""Cutting one step into two graphs, `verify` and `propose`, for hosts with their own scheduler.

The cut is found, not declared: a minimum cut weighted by bytes between what the results need
(everything up to the buffers the host reads) and what uses the MTP layers' weights, over the
graph's data dependencies and its order of effects. Values that cross become static buffers
`cross.*`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from mtpc.capture.effects import Effects, analyse, eliminate_dead_nodes
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.errors import GraphError
from mtpc.layout import BufferSpec

aten = torch.ops.aten

RESULT_BUFFERS = frozenset(
    ("batch.out_token_ids", "batch.num_accepted", "batch.num_emitted", "batch.stop_reason")
)
"""What a host reads after `verify`."""


@dataclass(frozen=True)
class SplitStep:
    """Two graphs over the buffers of one; running `verify` then `propose` equals the whole step.

    Attributes:
        verify: target forward, acceptance, results.
        propose: draft layer and chain, next state.
        crossing: buffers that carry values from one to the other.
    """

    verify: StepGraph
    propose: StepGraph
    crossing: tuple[BufferSpec, ...]

    @property
    def crossing_bytes(self) -> int:
        """Bytes handed over per step."""
        return sum(self.verify.layout.nbytes(spec.name) for spec in self.crossing)


def split_step(graph: StepGraph) -> SplitStep:
    """Cut a flat step graph in two.

    Args:
        graph: a decode or prefill step with K >= 1, after the passes; it is left as it is.

    Raises:
        GraphError: the graph is not flat, or proposes nothing.
    """
    if any(node.op == "call_module" for node in graph.graph.nodes):
        raise GraphError(f"{graph.key} is not one flat graph yet; run the passes first")
    if graph.key.spec_tokens == 0:
        raise GraphError(f"{graph.key} proposes nothing: with spec_tokens=0 there is only verify")
    effects = analyse(graph.graph)
    free = _replicable(graph.graph, effects)
    propose_side = _minimum_cut(graph.graph, effects, free)
    kept = [n for n in graph.graph.nodes if n not in free and n not in propose_side]
    crossing = [n for n in kept if n.users.keys() & propose_side]
    names = {node: f"cross.{node.name}" for node in crossing}
    specs = tuple(
        BufferSpec(name, tuple(node.meta["val"].shape), node.meta["val"].dtype)
        for node, name in names.items()
    )
    device = next(iter(graph.buffers().values())).device
    layout = graph.layout.extended(specs)
    tensors = {spec.name: layout.allocate(spec.name, device) for spec in specs}
    halves = []
    for keep_propose in (False, True):
        half = _half(graph, propose_side, free, names, tensors, keep_propose)
        halves.append(StepGraph(half, graph.key, layout, graph.weights, list(graph.history)))
    return SplitStep(halves[0], halves[1], specs)


def _replicable(graph: fx.Graph, effects: Effects) -> set[fx.Node]:
    """Attributes, and pure views of them: they cost nothing on either side."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_view = bool(inputs) and not effects.writes[node] and node not in effects.roots[node]
        if node.op in ("get_attr", "output") or (is_view and free.issuperset(inputs)):
            free.add(node)
    return free


def _minimum_cut(graph: fx.Graph, effects: Effects, free: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the propose side.

    Among cuts of equal bytes, the one with the fewest nodes in verify: results come earliest.
    """
    network = nx.DiGraph()
    scale = len(graph.nodes) + 1
    for node in graph.nodes:
        if node in free:
            continue
        _add_data_edges(network, node, free, scale)
        network.add_edge(node, "propose", capacity=1)
        if effects.buffer_writes(node) & RESULT_BUFFERS or node.meta.get("piece") == "target":
            network.add_edge("verify", node)  # No capacity: never cut.
        if any(str(arg.target).startswith("mtp.") for arg in node.all_input_nodes):
            network.add_edge(node, "propose", capacity=float("inf"))
    for earlier, later in _effect_order(graph, effects):
        network.add_edge(later, earlier)
    _, (_, propose_side) = nx.minimum_cut(network, "verify", "propose")
    return {node for node in propose_side if isinstance(node, fx.Node)}


def _add_data_edges(network: nx.DiGraph, node: fx.Node, free: set[fx.Node], scale: int) -> None:
    """A value that crosses costs its bytes once, however many consumers; it never flows back."""
    carrier = ("value", node)
    users = [user for user in node.users if user not in free]
    network.add_edge(node, carrier, capacity=scale * _nbytes(node.meta.get("val")))
    for user in users:
        network.add_edge(carrier, user)
        network.add_edge(user, node)


def _nbytes(value: Any) -> float:
    """Bytes of a tensor; a tuple cannot be put in a buffer and must not be cut."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else float("inf")


def _effect_order(graph: fx.Graph, effects: Effects) -> list[tuple[fx.Node, fx.Node]]:
    """(earlier, later) pairs of nodes that touch the same memory, one of them writing it."""
    accesses: dict[Any, list[tuple[fx.Node, bool]]] = {}
    for node in graph.nodes:
        for root in effects.reads(node) if node.op == "call_function" else ():
            accesses.setdefault(root, []).append((node, root in effects.writes[node]))
    pairs = []
    for touched in accesses.values():
        if any(writes for _, writes in touched):
            pairs += [(a, b) for (a, wa), (b, wb) in itertools.combinations(touched, 2) if wa or wb]
    return pairs


def _half(
    graph: StepGraph,
    propose_side: set[fx.Node],
    free: set[fx.Node],
    names: dict[fx.Node, str],
    tensors: dict[str, Tensor],
    keep_propose: bool,
) -> fx.GraphModule:
    """One side as a graph of its own: crossing values are written, or read, as buffers."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    module = graph.module
    for name, tensor in tensors.items():
        set_tensor(module, name, tensor, buffer=True)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node in free or (node in propose_side) == keep_propose:
            env[node] = new.node_copy(node, env.__getitem__)
        if node not in names:
            continue
        buffer = new.get_attr(names[node])
        buffer.meta = {"val": node.meta["val"]}
        if keep_propose:
            env[node] = buffer
        else:
            write = new.call_function(aten.copy_.default, (buffer, env[node]))
            write.meta = {"val": node.meta["val"], "piece": "cut"}
    new.output(())
    eliminate_dead_nodes(new)
    return fx.GraphModule(module, new)
