"""Cutting one step into two graphs, `verify` and `propose`, for hosts with their own scheduler.

A minimum cut, weighted by bytes, finds where to cut. The verify side holds the target's forward and
the nodes that write the results, which the host reads. The propose side holds the nodes that use
weights of MTP layers or masks of drafts, and those that update the requests' rows (`state.*`). The
cut respects data dependencies and the order of effects. Values that cross it become static buffers
`cross.*`.
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
from mtpc.capture.graph import StepGraph, dim_of, module_of, set_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.step_mode import nominal
from mtpc.errors import GraphError
from mtpc.layout import TEXT_IDS, VERIFY, BufferSpec

aten = torch.ops.aten

PROPOSE_INPUTS = ("mtp.", "batch.draft_mask")
"""Name prefixes of what only `propose` reads; a host may write these masks after `verify`."""
CROSS_MEANING = "values that `verify` passes to `propose`. `step_buffers` gives names and shapes"


@dataclass(frozen=True)
class SplitStep:
    """Two graphs over the buffers of one step; `verify` and then `propose` do the whole step.

    Attributes:
        verify: target forward, acceptance and results; it does not write `state.*`.
        propose: draft layer, chained drafts and the next state.
    """

    verify: StepGraph
    propose: StepGraph


def split_step(graph: StepGraph) -> SplitStep:
    """Cut a flat step graph, a decode or prefill step with K >= 1 after the passes, in two.

    Raises:
        GraphError: the graph is not flat, makes no drafts, or makes copies.
    """
    if not graph.is_flat:
        raise GraphError(
            f"{graph.key} still has pieces; expected a flat graph: run the passes first"
        )
    if graph.key.spec_tokens == 0:
        raise GraphError(
            f"{graph.key} has spec_tokens=0, so it makes no drafts; expected spec_tokens >= 1"
        )
    if TEXT_IDS in graph.layout:
        raise GraphError(
            "draft is 'copy', and a step in two parts has no place for copies yet; expected "
            "form='fused', or no draft: the host has the texts, and may write drafts of its own"
        )
    effects = analyse(graph.graph)
    free = _replicable(graph.graph, effects)
    propose_side = _minimum_cut(graph, effects, free)
    kept = [n for n in graph.graph.nodes if n not in free and n not in propose_side]
    crossing = [n for n in kept if n.users.keys() & propose_side]
    names = {node: f"cross.{node.name}" for node in crossing}
    mode = fake_mode_of(graph.graph)
    specs = tuple(
        BufferSpec(
            name,
            tuple(dim_of(mode, size) for size in node.meta["val"].shape),
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
    whole = graph.clone()  # The caller's module must not get the cross buffers.
    for name, tensor in tensors.items():
        set_tensor(whole.module, name, tensor)
    sides = _Sides(graph, propose_side, free, names)
    verify, propose = sides.verify(), sides.propose()
    return SplitStep(
        replace(whole, module=module_of(whole.module, verify), layout=layout, part="verify"),
        replace(whole, module=module_of(whole.module, propose), layout=layout, part="propose"),
    )


def _replicable(graph: fx.Graph, effects: Effects) -> set[fx.Node]:
    """Attributes and views of attributes, which both sides can have at no cost."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_view = bool(inputs) and not effects.writes[node] and node not in effects.roots[node]
        if node.op in ("get_attr", "output") or (is_view and free.issuperset(inputs)):
            free.add(node)
    return free


def _minimum_cut(step: StepGraph, effects: Effects, free: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the propose side.

    Of cuts with equal bytes, take the one with the fewest nodes in verify, so that results are
    ready as early as possible.
    """
    graph, results = step.graph, step.layout.results
    network = nx.DiGraph()
    scale = len(graph.nodes) + 1
    for node in graph.nodes:
        if node in free:
            continue
        # A value that crosses costs its bytes once, for any number of users, and never flows back.
        carrier = ("value", node)
        users = [user for user in node.users if user not in free]
        network.add_edge(node, carrier, capacity=scale * _nbytes(node.meta.get("val")))
        for user in users:
            network.add_edge(carrier, user)
            network.add_edge(user, node)
        network.add_edge(node, "propose", capacity=1)
        written = effects.buffer_writes(node)
        if not written.isdisjoint(results) or node.meta.get("piece") == "target":
            network.add_edge("verify", node)  # Without a capacity, an edge is never cut.
        drafts = any(str(arg.target).startswith(PROPOSE_INPUTS) for arg in node.all_input_nodes)
        if drafts or any(name.startswith("state.") for name in written):
            network.add_edge(node, "propose", capacity=float("inf"))
    # Pairs of nodes that access the same memory, of which one or both write.
    accesses: dict[Any, list[tuple[fx.Node, bool]]] = {}
    for node in graph.nodes:
        for root in effects.reads(node) if node.op == "call_function" else ():
            accesses.setdefault(root, []).append((node, root in effects.writes[node]))
    pairs = []
    for touched in accesses.values():
        if any(writes for _, writes in touched):
            pairs += [(a, b) for (a, wa), (b, wb) in itertools.combinations(touched, 2) if wa or wb]
    for earlier, later in pairs:
        network.add_edge(later, earlier)
    _, (_, propose_side) = nx.minimum_cut(network, "verify", "propose")
    return {node for node in propose_side if isinstance(node, fx.Node)}


def _nbytes(value: Any) -> float:
    """Bytes of a tensor; infinite for a tuple, which does not fit in a buffer.

    The number does not depend on open sizes, so the cut is the same for all their values.
    """
    if not isinstance(value, Tensor):
        return float("inf")
    return nominal(value.numel()) * value.element_size()


@dataclass(frozen=True)
class _Sides:
    """Builds the two graphs: of the whole step, its nodes of the propose side, and those that both
    may have. `names` has the buffer that carries each crossing node's value."""

    source: StepGraph
    on_propose: set[fx.Node]
    free: set[fx.Node]
    names: dict[fx.Node, str]

    def verify(self) -> fx.Graph:
        """The verify side, with writes of the crossing values at its end."""
        new, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes(lambda n: n not in self.on_propose):
            env[node] = new.node_copy(node, env.__getitem__)
        for node in self.names:
            buffer = self._buffer(new, node)
            write = new.call_function(aten.copy_.default, (buffer, env[node]))
            write.meta = {"val": buffer.meta["val"], "piece": "cut"}
        return _finish(new)

    def propose(self) -> fx.Graph:
        """The propose side; it reads each crossing value where the step computes it."""
        new, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes(lambda n: n in self.on_propose or n in self.names):
            crosses = node in self.names
            env[node] = self._buffer(new, node) if crosses else new.node_copy(node, env.__getitem__)
        return _finish(new)

    def _nodes(self, wanted: Callable[[fx.Node], bool]) -> list[fx.Node]:
        nodes = [n for n in self.source.graph.nodes if n.op != "output"]
        return [n for n in nodes if n in self.free or wanted(n)]

    def _buffer(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Append the get_attr node of a crossing buffer, with a fake value of its own."""
        buffer = graph.get_attr(self.names[node])
        with fake_mode_of(self.source.graph):
            buffer.meta = {"val": torch.empty_like(node.meta["val"])}
        return buffer


def _finish(graph: fx.Graph) -> fx.Graph:
    graph.output(())
    eliminate_dead_nodes(graph)
    return graph
