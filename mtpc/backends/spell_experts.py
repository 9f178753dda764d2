"""spell-experts: PyTorch's own operators for experts with biases whose weights are no codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtpc.backends.expand import Traced, expand
from mtpc.capture.graph import StepGraph
from mtpc.ops.experts import spelled_experts
from mtpc.passes.base import Pass, exchange


@dataclass(frozen=True)
class SpellExperts(Pass, policy="required"):
    """Put `spelled_experts` in place of each call of `mtpc::biased_experts` that is left.

    Kernels of experts with biases read codes only, and pack-blocks has replaced the calls that have
    them. A step computes all experts of the others, for all rows.
    """

    def apply(self, graph: StepGraph) -> int:
        traced: Traced = {}
        nodes = graph.graph.find_nodes(
            op="call_function", target=torch.ops.mtpc.biased_experts.default
        )
        return exchange(
            graph, nodes, lambda graph, node: expand(node, graph, spelled_experts, traced)
        )
