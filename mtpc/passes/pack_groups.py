"""pack-groups: products on weights of 4 and 8 bits, stored so or rounded by a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

import mtpc.ops.grouped  # noqa: F401  (registers the ops that this pass calls)
from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Policy, emit, emit_named
from mtpc.passes.linears import (
    EXPERT_WEIGHTS,
    LinearGroup,
    exchange_experts,
    joined_pieces,
    linear_groups,
    replace_groups,
    weight_of,
)
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.quantise import spec_by_scheme


@dataclass(frozen=True)
class PackGroups:
    """Replace linears and experts on weights in groups by ops that read the codes.

    These are weights that the checkpoint stores so and, with a scheme, all others but embeddings,
    routers and the joints of MTP layers. Linears that share an input become one if their weights
    have the same form. On by default on backends with kernels for them (cpu and cuda), and with a
    scheme on all. What no such op reads stays as it is: later passes pack its values.

    Attributes:
        scheme: of `mtpc.weights.quantise`; None rounds nothing.
    """

    name: ClassVar[str] = "pack-groups"
    policy: ClassVar[Policy] = "backend"
    scheme: str | None = None

    def apply(self, graph: StepGraph) -> int:
        found = {
            node: spec
            for node in graph.graph.nodes
            if (spec := self._spec(graph, node)) is not None
        }
        rewrites = sum(_place_linears(graph, spec, found) for spec in dict.fromkeys(found.values()))
        return rewrites + exchange_experts(
            graph,
            lambda node: all(arguments(node)[name] in found for name in EXPERT_WEIGHTS),
            lambda weight: True,
            lambda graph, node: _grouped_experts(graph, node, found),
        )

    def _spec(self, graph: StepGraph, node: fx.Node) -> GroupSpec | None:
        """How a node's weight is stored, or is to be rounded; None for all other nodes."""
        weight = weight_of(graph, node)
        if weight is None:
            return None
        name = str(node.target)
        return graph.weights.spec(name) or spec_by_scheme(self.scheme, name, weight)


def _place_linears(graph: StepGraph, spec: GroupSpec, specs: Mapping[fx.Node, GroupSpec]) -> int:
    """Replace the linears on weights of one spec; returns how many calls take their place."""
    groups = linear_groups(graph, lambda node, _: specs.get(arguments(node)["weight"]) == spec)
    replace_groups(groups, partial(_grouped_linear, spec=spec))
    return len(groups)


def _grouped_linear(group: LinearGroup, spec: GroupSpec) -> fx.Node:
    bias = group.bias()
    pieces = group.pieces(spec)
    args = (group.input, *pieces, group.features, *([] if bias is None else [bias]))
    return emit(group.graph.graph, torch.ops.mtpc.grouped_linear.default, args, group.nodes[0])


def _grouped_experts(
    graph: StepGraph, node: fx.Node, specs: Mapping[fx.Node, GroupSpec]
) -> fx.Node:
    values: dict[str, Any] = arguments(node)
    for name in EXPERT_WEIGHTS:
        weight = values[name]
        pieces = joined_pieces(graph, [weight], specs[weight])
        values[name], values[f"{name}_scales"], values[f"{name}_zeros"] = pieces
    return emit_named(graph.graph, torch.ops.mtpc.grouped_experts.default, values, node)
