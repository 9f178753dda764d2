"""quantise-draft: drafts from int8 weights, which verification makes harmless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import mtpc.ops.quantised  # noqa: F401  (registers the ops that take quantised weights)
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import emit
from mtpc.passes.linears import (
    LinearGroup,
    draft_nodes,
    exchange_experts,
    joined_weight,
    linear_groups,
    replace_groups,
)
from mtpc.weights.packing import can_quantise


@dataclass(frozen=True)
class QuantiseDraft:
    """Exchange the MTP layers' linears and experts, and the draft's use of the head, for int8
    products.

    Half the bytes of bfloat16 are read for each draft, and an int8 product does twice the work in
    an instruction. The target is left alone: what is emitted stays what plain decoding emits, and
    only how many drafts are accepted can change. Off by default; `mtpc bench` measures both
    sides. The head's int8 copy is memory on top of the target's.
    """

    name: ClassVar[str] = "quantise-draft"

    def apply(self, graph: StepGraph) -> int:
        draft = draft_nodes(graph.graph)
        groups = linear_groups(graph, lambda node, w: node in draft and can_quantise(w))
        replace_groups(groups, _quantised_linear)
        return len(groups) + exchange_experts(
            graph, lambda node: node in draft, can_quantise, _quantised_experts
        )


def _quantised_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    x, gate_up, down, *choice = node.args
    forms = [
        joined_weight(graph, [weight], form)  # type: ignore[list-item]
        for weight in (gate_up, down)
        for form in ("quantise", "scales")
    ]
    return emit(graph.graph, torch.ops.mtpc.quantised_experts.default, (x, *forms, *choice), node)


def _quantised_linear(group: LinearGroup) -> fx.Node:
    bias = group.bias()
    weight = group.weight("quantise")
    scales = group.weight("scales")
    args = (group.input, weight, scales, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.quantised_linear.default, args, group.nodes[0])
