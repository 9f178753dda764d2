"""merge-projections: one matrix product for linears that share an input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass
from mtpc.passes.linears import LinearGroup, joined_plain, linear_groups, replace_groups


@dataclass(frozen=True)
class MergeProjections(Pass, policy="backend"):
    """Concatenate the weights of linears that share an input (q/k/v, gate/up).

    It copies weights where the user's model keeps the originals; where mtpc read them itself, they
    become views of the merged weight. pack-weights does the same for the weights that it packs. All
    buckets share a merged weight. On by default on GPUs.
    """

    def apply(self, graph: StepGraph) -> int:
        groups = linear_groups(graph, lambda node, weight: True)
        return replace_groups([group for group in groups if len(group.nodes) > 1], _joint)


def _joint(group: LinearGroup) -> fx.Node:
    bias, weight = group.bias(), joined_plain(group.graph, group.weights)
    return group.emit(torch.ops.aten.linear.default, weight, *bias)
