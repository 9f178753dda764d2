"""Cutting one step into two graphs, `verify` and `propose`, for hosts with their own scheduler.

The cut is found, not declared: a minimum cut weighted by bytes between what the results need
(everything up to the buffers the host reads) and what uses the MTP layers' weights or drafts'
masks, or moves a request's rows on (`state.*`), over the graph's data dependencies and its order of
effects. Values that cross become static buffers `cross.*`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from mtpc.capture.effects import Effects, analyse, eliminate_dead_nodes
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import GraphError
from mtpc.layout import VERIFY, BufferSpec

aten = torch.ops.aten

PROPOSE_INPUTS = ("mtp.", "batch.draft_mask")
"""Beginnings of the names of what only `propose` reads: a host may write these masks late."""


CROSS_MEANING = "what `verify` hands to `propose`; opaque. `step_buffers` has names and shapes"


@dataclass(frozen=True)
class SplitStep:
    """Two graphs over the buffers of one; running `verify` then `propose` equals the whole step.

    Attributes:
        verify: target forward, acceptance, results; it writes no request's rows.
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
    if not graph.is_flat:
        raise GraphError(f"{graph.key} is not one flat graph yet; run the passes first")
    if graph.key.spec_tokens == 0:
        raise GraphError(f"{graph.key} proposes nothing: with spec_tokens=0 there is only verify")
    effects = analyse(graph.graph)
    free = _replicable(graph.graph, effects)
    propose_side = _minimum_cut(graph, effects, free)
    kept = [n for n in graph.graph.nodes if n not in free and n not in propose_side]
    crossing = [n for n in kept if n.users.keys() & propose_side]
    names = {node: f"cross.{node.name}" for node in crossing}
    specs = tuple(
        BufferSpec(
            name,
            tuple(node.meta["val"].shape),
            node.meta["val"].dtype,
            0,
            VERIFY,
            CROSS_MEANING,
            needs_pad=False,
        )
        for node, name in names.items()
    )
    device = next(iter(graph.buffers().values())).device
    layout = graph.layout.extended(specs)
    tensors = {spec.name: layout.allocate(spec.name, device) for spec in specs}
    whole = graph.clone()  # For its attributes: the caller's module gets no cross buffers.
    for name, tensor in tensors.items():
        set_tensor(whole.module, name, tensor, buffer=True)
    sides = _Sides(graph, propose_side, free, names)
    verify, propose = sides.verify(), sides.propose()
    return SplitStep(
        replace(whole, module=fx.GraphModule(whole.module, verify), layout=layout, part="verify"),
        replace(whole, module=fx.GraphModule(whole.module, propose), layout=layout, part="propose"),
        specs,
    )


def _replicable(graph: fx.Graph, effects: Effects) -> set[fx.Node]:
    """Attributes, and pure views of them: they cost nothing on either side."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_view = bool(inputs) and not effects.writes[node] and node not in effects.roots[node]
        if node.op in ("get_attr", "output") or (is_view and free.issuperset(inputs)):
            free.add(node)
    return free


def _minimum_cut(step: StepGraph, effects: Effects, free: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the propose side.

    Among cuts of equal bytes, the one with the fewest nodes in verify: results come earliest.
    """
    graph, results = step.graph, step.layout.results
    network = nx.DiGraph()
    scale = len(graph.nodes) + 1
    for node in graph.nodes:
        if node in free:
            continue
        _add_data_edges(network, node, free, scale)
        network.add_edge(node, "propose", capacity=1)
        written = effects.buffer_writes(node)
        if not written.isdisjoint(results) or node.meta.get("piece") == "target":
            network.add_edge("verify", node)  # No capacity: never cut.
        if _drafts(node) or any(name.startswith("state.") for name in written):
            network.add_edge(node, "propose", capacity=float("inf"))
    for earlier, later in _effect_order(graph, effects):
        network.add_edge(later, earlier)
    _, (_, propose_side) = nx.minimum_cut(network, "verify", "propose")
    return {node for node in propose_side if isinstance(node, fx.Node)}


def _drafts(node: fx.Node) -> bool:
    """Whether a node takes a weight of an MTP layer, or what a host writes between the halves."""
    return any(str(arg.target).startswith(PROPOSE_INPUTS) for arg in node.all_input_nodes)


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


@dataclass(frozen=True)
class _Sides:
    """Builds the two graphs.

    Attributes:
        source: the whole step.
        on_propose: its nodes of the propose side.
        free: nodes that either side may repeat.
        names: crossing nodes, and the buffers that carry them.
    """

    source: StepGraph
    on_propose: set[fx.Node]
    free: set[fx.Node]
    names: dict[fx.Node, str]

    def verify(self) -> fx.Graph:
        """The verify side; it ends in writes of the crossing values."""
        new, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes(lambda n: n not in self.on_propose):
            env[node] = new.node_copy(node, env.__getitem__)
        for node in self.names:
            write = new.call_function(aten.copy_.default, (self._buffer(new, node), env[node]))
            write.meta = {"val": write.args[0].meta["val"], "piece": "cut"}  # type: ignore[union-attr]
        return _finish(new)

    def propose(self) -> fx.Graph:
        """The propose side; it reads the crossing values where they were made."""
        new, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes(lambda n: n in self.on_propose or n in self.names):
            crosses = node in self.names
            env[node] = self._buffer(new, node) if crosses else new.node_copy(node, env.__getitem__)
        return _finish(new)

    def _nodes(self, wanted: Callable[[fx.Node], bool]) -> list[fx.Node]:
        nodes = [n for n in self.source.graph.nodes if n.op != "output"]
        return [n for n in nodes if n in self.free or wanted(n)]

    def _buffer(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """get_attr of a crossing buffer, with memory of its own."""
        buffer = graph.get_attr(self.names[node])
        with fake_mode_of(self.source.graph):
            buffer.meta = {"val": torch.empty_like(node.meta["val"])}
        return buffer


def _finish(graph: fx.Graph) -> fx.Graph:
    graph.output(())
    eliminate_dead_nodes(graph)
    return graph
