"""Linears that share an input, and one call in place of them; mixtures of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, get_tensor, is_buffer_name
from mtpc.passes.base import emit, emit_weight, is_call, refresh_values, sweep
from mtpc.weights.packing import TILE
from mtpc.weights.recipes import Conversion, Convert, Join, Recipe

aten = torch.ops.aten

_STEMS: dict[Conversion | None, str] = {
    None: "merged",
    "pack": "packed",
    "quantise": "quantised",
    "scales": "scales",
}
Wanted = Callable[[fx.Node, Tensor], bool]
"""Whether to take a linear, by its node and its weight."""


@dataclass(frozen=True)
class LinearGroup:
    """Linears of one input whose operands are weights: all with a bias, or none.

    Attributes:
        graph: where they are.
        nodes: in order of execution.
    """

    graph: StepGraph
    nodes: tuple[fx.Node, ...]

    @property
    def input(self) -> fx.Node:
        return self.nodes[0].args[0]  # type: ignore[return-value]

    @property
    def features(self) -> int:
        """Output features of all together."""
        return sum(_features(node) for node in self.nodes)

    def weight(self, form: Conversion | None = None) -> fx.Node:
        """get_attr of their weights as one, in a form of `weights.packing`; made once a program."""
        return joined_weight(self.graph, self._operands(1), form)

    def bias(self) -> fx.Node | None:
        """get_attr of their biases as one."""
        if _bias(self.nodes[0]) is None:
            return None
        return joined_weight(self.graph, self._operands(2), None)

    def _operands(self, index: int) -> list[fx.Node]:
        return [node.args[index] for node in self.nodes]  # type: ignore[misc]


def joined_weight(graph: StepGraph, weights: list[fx.Node], form: Conversion | None) -> fx.Node:
    """get_attr of weights as one, in a form of `mtpc.weights.packing`; made once per program."""
    names = tuple(str(weight.target) for weight in weights)
    if len(names) == 1 and form is None:
        return weights[0]
    joined: Recipe = names[0] if len(names) == 1 else Join("cat", names)
    recipe = joined if form is None else Convert(form, joined)
    name = f"{_STEMS[form]}." + "+".join(part.replace(".", "_") for part in names)
    return emit_weight(graph, name, recipe, weights[0])


def draft_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The MTP layers' nodes, and what is computed of theirs: the head, which has no name of its
    own there because the target's is used."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_layer = node.meta.get("piece", "").startswith("drafts.")
        if is_layer or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def linear_groups(graph: StepGraph, wanted: Wanted) -> list[LinearGroup]:
    """Wanted linears by input; one that shares its input with none is a group of its own."""
    found: dict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        weight = _weight(graph, node)
        if weight is not None and wanted(node, weight):
            found[node.args[0], _bias(node) is not None].append(node)
    return [LinearGroup(graph, tuple(nodes)) for nodes in found.values()]


def replace_groups(groups: list[LinearGroup], joint: Callable[[LinearGroup], fx.Node]) -> None:
    """Put one call in place of each group; its results are slices of the call's.

    Args:
        groups: of one graph.
        joint: emits the call, which gives [..., features].
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
    """Put other calls in place of wanted `mtpc::experts` whose weights fill their tiles.

    Args:
        graph: of the calls.
        wanted: whether to take a call.
        has_form: whether a stack of weights has the form that the new call takes.
        call: emits it.

    Returns:
        How many were exchanged.
    """
    found = [
        node
        for node in graph.graph.nodes
        if is_call(node, torch.ops.mtpc.experts.default)
        and wanted(node)
        and _fill_tiles([weight_of(graph, node.args[index]) for index in (1, 2)], has_form)
    ]
    for node in found:
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, node))
        graph.graph.erase_node(node)
    if found:
        sweep(graph)
    return len(found)


def _fill_tiles(weights: list[Tensor | None], has_form: Callable[[Tensor], bool]) -> bool:
    """Whether gate and up, which are one weight, are each made of whole tiles."""
    down = weights[1]
    known = all(weight is not None and has_form(weight) for weight in weights)
    return known and down is not None and down.shape[2] % TILE == 0


def _features(node: fx.Node) -> int:
    return node.meta["val"].shape[-1]


def _bias(node: fx.Node) -> fx.Node | None:
    return node.args[2] if len(node.args) > 2 else None  # type: ignore[return-value]


def _weight(graph: StepGraph, node: fx.Node) -> Tensor | None:
    """The weight of a linear whose operands are weights; None for anything else."""
    if not is_call(node, aten.linear.default):
        return None
    operands = [node.args[1], *([_bias(node)] if _bias(node) is not None else [])]
    tensors = [weight_of(graph, operand) for operand in operands]
    return tensors[0] if all(tensor is not None for tensor in tensors) else None


def weight_of(graph: StepGraph, operand: object) -> Tensor | None:
    """The tensor of an operand that is a weight, or None."""
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    name = str(operand.target)
    return None if is_buffer_name(name) else get_tensor(graph.module, name)
