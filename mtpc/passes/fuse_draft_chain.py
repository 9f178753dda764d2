"""fuse-draft-chain: one flat graph of verification, the draft layer and its K-1 chained steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import Inliner
from mtpc.passes.base import Pass, sweep


@dataclass(frozen=True)
class FuseDraftChain(Pass, policy="required"):
    """Inline every piece at the bucket's sizes; counts the pieces inlined.

    The draft layer was traced once with symbolic sizes. The pass inlines that trace for the R*Q
    verified rows and again for each single-row step, with the metadata updates in between. So the
    host has no work between drafts. If the step makes fewer drafts than there are MTP layers, the
    others only write their KV; the pass removes their attention and all that depends on it.

    `buffer_names` has layout names by tensor id, for state that pieces hold (`kv.*`).
    """

    buffer_names: Mapping[int, str] = field(repr=False)

    def apply(self, graph: StepGraph) -> int:
        if graph.is_flat:
            return 0
        inliner = Inliner(graph, self.buffer_names)
        layers = [n for n in graph.graph.nodes if str(n.target).startswith("pieces.drafts.")]
        graph.module = inliner.run()
        if len(layers) > graph.key.spec_tokens:
            sweep(graph)
        return inliner.num_inlined
