"""What several passes need to find and replace linears and experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments, get_tensor, is_buffer_name
from mtpc.passes.base import emit, emit_weight, is_call, refresh_values, sweep
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.packing import TILE
from mtpc.weights.recipes import Conversion, Convert, Grouped, Join, Recipe

aten = torch.ops.aten

_STEMS: dict[Conversion | None, str] = {
    None: "merged",
    "pack": "packed",
    "quantise": "quantised",
    "scales": "scales",
}
EXPERT_WEIGHTS = ("gate_up", "down")
"""Arguments of `mtpc::experts` that are stacks of weights."""
Wanted = Callable[[fx.Node, Tensor], bool]
"""(node, weight) -> whether a pass wants to replace the linear."""


@dataclass(frozen=True)
class LinearGroup:
    """Linears that share an input and whose operands are weights; all have a bias, or none has.

    Attributes:
        graph: the graph of the linears.
        nodes: the linears in order of execution.
    """

    graph: StepGraph
    nodes: tuple[fx.Node, ...]

    @property
    def input(self) -> fx.Node:
        return self._operands("input")[0]

    @property
    def features(self) -> int:
        """Sum of their output features."""
        return sum(_features(node) for node in self.nodes)

    def weight(self, form: Conversion | None = None) -> fx.Node:
        """Append the get_attr node of their joined weight; see `joined_weight`."""
        return joined_weight(self.graph, self._operands("weight"), form)

    def pieces(self, spec: GroupSpec) -> tuple[fx.Node | None, ...]:
        """Append the get_attr nodes of their joined codes, scales and zero points."""
        return joined_pieces(self.graph, self._operands("weight"), spec)

    def bias(self) -> fx.Node | None:
        """Append the get_attr node of their joined bias; None if they have none."""
        biases = self._operands("bias")
        return None if biases[0] is None else joined_weight(self.graph, biases, None)

    def _operands(self, name: str) -> list[fx.Node]:
        return [arguments(node)[name] for node in self.nodes]


def joined_weight(graph: StepGraph, weights: list[fx.Node], form: Conversion | None) -> fx.Node:
    """Append the get_attr node of the concatenation of weights; a program makes it once.

    Args:
        graph: where to append it.
        weights: get_attr nodes.
        form: conversion of `mtpc.weights.packing`; None keeps plain rows.
    """
    if len(weights) == 1 and form is None:
        return weights[0]
    joined, stem = _joined(weights)
    recipe = joined if form is None else Convert(form, joined)
    return emit_weight(graph, f"{_STEMS[form]}.{stem}", recipe, weights[0])


def joined_pieces(
    graph: StepGraph, weights: list[fx.Node], spec: GroupSpec
) -> tuple[fx.Node | None, ...]:
    """Append the get_attr nodes of the concatenation of weights in groups.

    Args:
        graph: where to append them.
        weights: get_attr nodes.
        spec: of the weights.

    Returns:
        Codes, scales and zero points; None in place of the last where the form has none.
    """
    joined, stem = _joined(weights)
    nodes = [
        emit_weight(graph, f"grouped.{stem}.{piece}", Grouped(piece, spec, joined), weights[0])
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
        is_layer = node.meta.get("piece", "").startswith("drafts.")
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


def replace_groups(groups: list[LinearGroup], joint: Callable[[LinearGroup], fx.Node]) -> None:
    """Replace each group by one call, and each linear by a slice of its result.

    Args:
        groups: of one graph.
        joint: emits the call for a group; its result is [..., features].
    """
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
    if groups:
        sweep(groups[0].graph)
        refresh_values(groups[0].graph)


def exchange_experts(
    graph: StepGraph,
    wanted: Callable[[fx.Node], bool],
    has_form: Callable[[Tensor], bool],
    call: Callable[[StepGraph, fx.Node], fx.Node],
) -> int:
    """Replace wanted calls of `mtpc::experts` whose gate and up weights are whole tiles.

    Args:
        graph: of the calls.
        wanted: whether to replace a call.
        has_form: whether a stack of weights can be converted for the new call.
        call: emits the new call.

    Returns:
        The number of calls replaced.
    """
    found = [
        node
        for node in graph.graph.nodes
        if is_call(node, torch.ops.mtpc.experts.default)
        and wanted(node)
        and _fill_tiles([weight_of(graph, arguments(node)[w]) for w in EXPERT_WEIGHTS], has_form)
    ]
    for node in found:
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, node))
        graph.graph.erase_node(node)
    if found:
        sweep(graph)
    return len(found)


def _fill_tiles(weights: list[Tensor | None], has_form: Callable[[Tensor], bool]) -> bool:
    """Whether (gate_up, down) have the wanted form, and gate and up are whole tiles each."""
    down = weights[1]
    known = all(weight is not None and has_form(weight) for weight in weights)
    return known and down is not None and down.shape[2] % TILE == 0


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
