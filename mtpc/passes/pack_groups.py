"""pack-groups: products on weights of 4 and 8 bits, stored so or rounded by a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.errors import OptionError
from mtpc.passes.base import Pass, emit, emit_named, exchange, is_call, is_narrow, tidy
from mtpc.passes.linears import (
    EXPERT_WEIGHTS,
    LinearGroup,
    exchange_experts,
    joined_pieces,
    linear_groups,
    replace_groups,
    weight_of,
)
from mtpc.weights.grouped import PACKED_INPUTS
from mtpc.weights.packing import TILE

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupSpec

_WEIGHTS: Mapping[Any, tuple[str, ...]] = {
    torch.ops.aten.linear.default: ("weight",),
    torch.ops.mtpc.experts.default: EXPERT_WEIGHTS,
}
"""Operators that have a counterpart on weights in groups -> the arguments that are weights."""
SpecOf: TypeAlias = "Callable[[fx.Node, str, Tensor], GroupSpec | None]"
"""(call, a weight's name, the weight) -> how the call is to read its codes, or None."""


@dataclass(frozen=True)
class PackBlocks(Pass, policy="backend"):
    """Replace linears, experts and embeddings on weights of blocks by ops that read them as stored.
    `scheme` is as `PackGroups` has it.

    Such weights have codes of 5 or 6 bits, codes that are places in a table, or scales of
    super-blocks, as GGUF's types have them. Without this pass, pack-groups widens their codes to 4
    or 8 bits and their scales to floats, those of experts with biases (gpt-oss), too. Embeddings
    whose checkpoint stores codes are read by row, and stay codes as well. On by default on backends
    with kernels for them (cpu).
    """

    scheme: str = ""

    def apply(self, graph: StepGraph) -> int:
        def spec(call: fx.Node, name: str, weight: Tensor) -> GroupSpec | None:
            found = _spec_of(graph, self.scheme, name, weight)
            return None if found is None or found == found.widened() else found

        placed = _place_embeddings(graph) + _place_biased_experts(graph, lambda stored: stored)
        return placed + place_groups(graph, spec, "grouped")


@dataclass(frozen=True)
class PackGroups(Pass, policy="backend"):
    """Replace linears and experts on grouped weights by ops that read the codes.

    The checkpoint stores these weights in groups or, with a scheme, the pass rounds all weights
    but embeddings, routers and the entry projections of MTP layers. Linears that share an input
    become one if their weights have the same form. On by default on backends with kernels for them
    (cpu and cuda), and with a scheme on all. Where pack-blocks does not run, weights of schemes of
    blocks have 8 bits. Other weights stay as they are for later passes.

    Attributes:
        scheme: of `mtpc.weights.quantise`; "" rounds nothing.
    """

    scheme: str = ""

    def apply(self, graph: StepGraph) -> int:
        def spec(call: fx.Node, name: str, weight: Tensor) -> GroupSpec | None:
            found = _spec_of(graph, self.scheme, name, weight)
            return found and found.widened()

        placed = _place_biased_experts(graph, lambda stored: stored.widened())
        return placed + place_groups(graph, spec, "grouped")


def _spec_of(graph: StepGraph, scheme: str, name: str, weight: Tensor) -> GroupSpec | None:
    """The spec of a weight with inputs last: as it is stored, or by a scheme; None: it is plain."""
    found = graph.weights.spec(name) or _by_scheme(graph, scheme, name, weight)
    return None if found is None or found.turned else found


def _by_scheme(graph: StepGraph, scheme: str, name: str, weight: Tensor) -> GroupSpec | None:
    """The spec of the whole weight, of which ranks have parts with its scales."""
    if not scheme:
        return None
    from mtpc.weights.quantise import spec_by_scheme  # Not above: few builds round weights.

    whole = graph.weights.wholes.get(name, name)
    inputs = graph.weights[whole].shape[-1]
    spec = spec_by_scheme(scheme, whole, graph.weights[whole])
    step = 1 if spec is None else PACKED_INPUTS[spec.form.kind] if weight.dim() == 2 else TILE
    if weight.shape[-1] % step and inputs % step == 0:
        raise OptionError(
            f"quantize is {scheme!r}, and a rank has {weight.shape[-1]} of the {inputs} inputs of "
            f"{whole}; expected a multiple of {step}, which kernels read at once: use fewer "
            "ranks, or leave quantize out"
        )
    return spec


def place_groups(graph: StepGraph, spec_of: SpecOf, stem: str) -> int:
    """Replace linears and experts by ops that read the codes of their weights, as `spec_of` says;
    returns how many. Names of codes and scales begin with `stem`: a weight may be read in several
    forms."""
    specs: dict[fx.Node, tuple[GroupSpec, ...]] = {}
    for node in graph.graph.nodes:
        names = _WEIGHTS.get(node.target, ())
        operands = [arguments(node)[name] for name in names]
        found = [
            spec
            for operand in operands
            if (weight := weight_of(graph, operand)) is not None
            and (spec := spec_of(node, str(operand.target), weight)) is not None
        ]
        if names and len(found) == len(names):
            specs[node] = tuple(found)
    groups = [
        group
        for form in dict.fromkeys(specs.values())
        for group in linear_groups(graph, lambda node, _, form=form: specs.get(node) == form)  # type: ignore[misc]
    ]
    placed = replace_groups(groups, lambda g: _grouped_linear(g, specs[g.nodes[0]][0], stem))
    return placed + exchange_experts(
        graph,
        lambda node, _: node in specs,
        lambda graph, node: _grouped_experts(graph, node, specs[node], stem),
    )


def _place_embeddings(graph: StepGraph) -> int:
    """Replace embeddings whose checkpoint stores codes; returns how many."""
    found = []
    for node in graph.graph.nodes:
        if is_call(node, torch.ops.aten.embedding.default) and is_narrow(node):
            operand = arguments(node)["weight"]
            if weight_of(graph, operand) is None:
                continue
            spec = graph.weights.spec(str(operand.target))
            if spec is not None and spec.form.kind != "float8":
                found.append((node, operand, spec))
    for node, operand, spec in found:
        inputs = operand.meta["val"].shape[-1]
        with graph.graph.inserting_before(node):
            pieces = joined_pieces(graph, [operand], spec, "grouped")
            args = (arguments(node)["indices"], *pieces, inputs)
            rows = emit(graph.graph, torch.ops.mtpc.grouped_embedding.default, args, node)
        node.replace_all_uses_with(rows)
    return tidy(graph, len(found))


def _place_biased_experts(graph: StepGraph, read: Callable[[GroupSpec], GroupSpec]) -> int:
    """Replace experts with biases that are stored as codes, by codes as `read` gives them."""
    found: dict[fx.Node, Sequence[GroupSpec]] = {}
    for node in graph.graph.nodes:
        if not is_call(node, torch.ops.mtpc.biased_experts.default):
            continue
        operands = [arguments(node)[name] for name in EXPERT_WEIGHTS]
        if all(weight_of(graph, operand) is not None for operand in operands):
            stored = (graph.weights.spec(str(operand.target)) for operand in operands)
            specs = [read(spec) for spec in stored if spec and spec.turned]
            if len(specs) == len(operands) and all("zeros" not in s.pieces for s in specs):
                found[node] = specs
    target = torch.ops.mtpc.grouped_biased_experts.default
    return exchange(
        graph,
        [*found],
        lambda graph, node: _grouped_experts(graph, node, found[node], "grouped", target),
    )


def _grouped_linear(group: LinearGroup, spec: GroupSpec, stem: str) -> fx.Node:
    bias, pieces = group.bias(), joined_pieces(group.graph, group.weights, spec, stem)
    return group.emit(torch.ops.mtpc.grouped_linear.default, *pieces, group.features, *bias)


def _grouped_experts(
    graph: StepGraph,
    node: fx.Node,
    specs: Sequence[GroupSpec],
    stem: str,
    target: Any = torch.ops.mtpc.grouped_experts.default,
) -> fx.Node:
    values: dict[str, Any] = arguments(node)
    for name, spec in zip(EXPERT_WEIGHTS, specs, strict=True):
        pieces = joined_pieces(graph, [values[name]], spec, stem)
        values[name], values[f"{name}_scales"], values[f"{name}_zeros"] = pieces
    return emit_named(graph.graph, target, values, node)
