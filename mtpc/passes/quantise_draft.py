"""quantise-draft: drafts from int8 weights; verification keeps the emitted text exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import mtpc.ops.quantised  # noqa: F401  (registers the ops that take quantised weights)
from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Policy, emit, emit_named
from mtpc.passes.linears import (
    EXPERT_WEIGHTS,
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
    """Replace the linears and experts of the MTP layers, and the draft head, by int8 products.

    A draft then reads half the bytes of bfloat16, and an int8 instruction does twice the work. The
    target stays as it is, so the emitted text is that of plain decoding; only the number of
    accepted drafts can change. The int8 copy of the head takes memory beside the target's head. Off
    by default; `mtpc bench --compare quantise-draft` measures what it gains and costs.
    """

    name: ClassVar[str] = "quantise-draft"
    policy: ClassVar[Policy] = "off"

    def apply(self, graph: StepGraph) -> int:
        draft = draft_nodes(graph.graph)
        groups = linear_groups(graph, lambda node, w: node in draft and can_quantise(w))
        replace_groups(groups, _quantised_linear)
        return len(groups) + exchange_experts(
            graph, lambda node: node in draft, can_quantise, _quantised_experts
        )


def _quantised_experts(graph: StepGraph, node: fx.Node) -> fx.Node:
    values = arguments(node)
    for name in EXPERT_WEIGHTS:
        weight = values[name]
        values[name] = joined_weight(graph, [weight], "quantise")
        values[f"{name}_scales"] = joined_weight(graph, [weight], "scales")
    return emit_named(graph.graph, torch.ops.mtpc.quantised_experts.default, values, node)


def _quantised_linear(group: LinearGroup) -> fx.Node:
    bias = group.bias()
    weight = group.weight("quantise")
    scales = group.weight("scales")
    args = (group.input, weight, scales, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.quantised_linear.default, args, group.nodes[0])
