"""What several passes need to find and replace linears and experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from mtpc.capture.graph import DRAFT_PIECES, StepGraph, arguments, get_tensor
from mtpc.layout.specs import is_buffer_name
from mtpc.passes.base import aten, emit, emit_weight, exchange, is_call, tidy
from mtpc.weights.packing import TILE
from mtpc.weights.recipes import Grouped, Join, Packed, Recipe

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupSpec

EXPERT_WEIGHTS = ("gate_up", "down")
"""Arguments of `mtpc::experts` that are stacks of weights."""
Wanted = Callable[[fx.Node, Tensor], bool]
"""(call, a weight of it) -> whether a pass wants to replace the call."""


@dataclass(frozen=True)
class LinearGroup:
    """Linears of one graph, in order of execution, that share an input and whose operands are
    weights; all have a bias, or none has."""

    graph: StepGraph
    nodes: tuple[fx.Node, ...]

    @property
    def input(self) -> fx.Node:
        return self._operands("input")[0]

    @property
    def features(self) -> int:
        return sum(_features(node) for node in self.nodes)

    @property
    def weights(self) -> list[fx.Node]:
        return self._operands("weight")

    def bias(self) -> tuple[fx.Node, ...]:
        """Append the get_attr node of their joined bias; () if they have none."""
        biases = self._operands("bias")
        return () if biases[0] is None else (joined_plain(self.graph, biases),)

    def emit(self, target: Any, *operands: Any) -> fx.Node:
        """Append a call of an operator on their input and these operands."""
        return emit(self.graph.graph, target, (self.input, *operands), self.nodes[0])

    def _operands(self, name: str) -> list[fx.Node]:
        return [arguments(node)[name] for node in self.nodes]


def joined_plain(graph: StepGraph, weights: list[fx.Node]) -> fx.Node:
    """Append the get_attr node of the concatenation of weights; a program makes it once."""
    if len(weights) == 1:
        return weights[0]
    joined, stem = _joined(weights)
    return emit_weight(graph, f"merged.{stem}", joined, weights[0])


def joined_packed(graph: StepGraph, weights: list[fx.Node]) -> fx.Node:
    """Append the get_attr node of the packed concatenation of weights, given as get_attr nodes."""
    joined, stem = _joined(weights)
    return emit_weight(graph, f"packed.{stem}", Packed(joined), weights[0])


def joined_pieces(
    graph: StepGraph, weights: list[fx.Node], spec: GroupSpec, stem: str
) -> tuple[fx.Node | None, ...]:
    """Append the get_attr nodes of the concatenation of weights in groups, whose names begin with
    `stem`: codes, scales and zero points. None is in place of the last where the form has none."""
    joined, name = _joined(weights)
    nodes = [
        emit_weight(graph, f"{stem}.{name}.{piece}", Grouped(piece, spec, joined), weights[0])
        for piece in spec.pieces
    ]
    return (*nodes, *[None] * (3 - len(nodes)))


def _joined(weights: list[fx.Node]) -> tuple[Recipe, str]:
    """The recipe of a concatenation of weights, and a name without dots."""
    names = tuple(str(weight.target) for weight in weights)
    joined: Recipe = names[0] if len(names) == 1 else Join("cat", names)
    return joined, "+".join(part.replace(".", "_") for part in names)


def draft_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the MTP layers, and all that depend on them.

    Among the latter are the draft heads: an MTP layer uses the target's head, so names of pieces do
    not tell them apart.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_layer = node.meta.get("piece", "").startswith(DRAFT_PIECES)
        if is_layer or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def linear_groups(graph: StepGraph, wanted: Wanted) -> list[LinearGroup]:
    """Wanted linears in groups that share an input; a group may hold a single linear."""
    found: dict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        weight = _weight(graph, node)
        if weight is not None and wanted(node, weight):
            operands = arguments(node)
            found[operands["input"], operands["bias"] is not None].append(node)
    return [LinearGroup(graph, tuple(nodes)) for nodes in found.values()]


def replace_groups(groups: list[LinearGroup], joint: Callable[[LinearGroup], fx.Node]) -> int:
    """Replace each group by one call, which `joint` emits with a result [..., features], and each
    linear by a slice of its result. Returns the number of groups."""
    for group in groups:
        first = group.nodes[0]
        with group.graph.graph.inserting_before(first):
            result = joint(group)
            start = 0
            for node in group.nodes:
                end, part = start + _features(node), result
                if len(group.nodes) > 1:
                    slices = (result, -1, start, end)
                    part = emit(group.graph.graph, aten.slice.Tensor, slices, node)
                node.replace_all_uses_with(part)
                start = end
        for node in group.nodes:
            group.graph.graph.erase_node(node)
    return tidy(groups[0].graph, len(groups)) if groups else 0


def exchange_experts(
    graph: StepGraph, wanted: Wanted, call: Callable[[StepGraph, fx.Node], fx.Node]
) -> int:
    """Replace calls of `mtpc::experts` whose gate and up weights are whole tiles each, if both
    stacks of weights are wanted. Returns the number of calls replaced."""
    found = [
        node
        for node in graph.graph.nodes
        if is_call(node, torch.ops.mtpc.experts.default) and _fits_tiles(graph, node, wanted)
    ]
    return exchange(graph, found, call)


def _fits_tiles(graph: StepGraph, node: fx.Node, wanted: Wanted) -> bool:
    """Whether both stacks of weights are wanted, and gate and up are whole tiles each."""
    gate_up, down = (weight_of(graph, arguments(node)[name]) for name in EXPERT_WEIGHTS)
    if gate_up is None or down is None:
        return False
    return wanted(node, gate_up) and wanted(node, down) and down.shape[2] % TILE == 0


def _features(node: fx.Node) -> int:
    return node.meta["val"].shape[-1]


def _weight(graph: StepGraph, node: fx.Node) -> Tensor | None:
    """The weight of a linear whose operands are all weights; None for any other node."""
    if not is_call(node, aten.linear.default):
        return None
    _, weight, bias = arguments(node).values()
    is_known = bias is None or weight_of(graph, bias) is not None
    return weight_of(graph, weight) if is_known else None


def weight_of(graph: StepGraph, operand: object) -> Tensor | None:
    """The tensor of an operand if it is a weight, else None."""
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    name = str(operand.target)
    return None if is_buffer_name(name) else get_tensor(graph.module, name)
