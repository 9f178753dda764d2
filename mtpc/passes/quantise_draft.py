"""quantise-draft: drafts from int8 weights; verification keeps the emitted text exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass
from mtpc.passes.linears import draft_nodes
from mtpc.passes.pack_groups import place_groups
from mtpc.weights.grouped import PACKED_INPUTS
from mtpc.weights.grouped_recipes import GroupSpec


@dataclass(frozen=True)
class QuantiseDraft(Pass, policy="off"):
    """Replace the linears and experts of the MTP layers, and the draft head, by int8 products.

    A draft then reads half the bytes of bfloat16, and an int8 instruction does twice the work. The
    target stays as it is, so the emitted text is that of plain decoding; only the number of
    accepted drafts can change. The int8 copy of the head takes memory beside the target's head. Off
    by default; `mtpc bench --compare quantise-draft` measures what it gains and costs.
    """

    def apply(self, graph: StepGraph) -> int:
        draft = draft_nodes(graph.graph)

        def spec(call: fx.Node, name: str, weight: Tensor) -> GroupSpec | None:
            whole = graph.weights.wholes.get(name, name)
            spec = draft_spec(graph.weights[whole]) if call in draft else None
            fills_words = weight.shape[-1] % PACKED_INPUTS["int8"] == 0  # A rank's part may not.
            return spec if fills_words else None

        return place_groups(graph, spec, "quantised")


def draft_spec(weight: Tensor) -> GroupSpec | None:
    """The spec by which drafts read a weight: int8 with a scale per row; None if it does not
    fit."""
    from mtpc.weights.quantise import scheme_spec  # Not above: few builds round weights.

    spec = scheme_spec("int8", weight)
    return None if spec is None else replace(spec, by_largest=True)
