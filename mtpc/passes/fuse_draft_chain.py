"""fuse-draft-chain: one flat graph out of verify, the draft layer and its K-1 chained steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import Inliner
from mtpc.passes.base import Policy, sweep


@dataclass(frozen=True)
class FuseDraftChain:
    """Inline every piece at the bucket's sizes.

    The draft layer was traced once with symbolic sizes; it is instantiated here for the R*Q
    verified rows and again for each single-row step, metadata updates in between included, so
    that no host work is left between drafts. Rewrites are the pieces inlined. Of MTP layers that
    only keep their KV, where K changes between steps, attention and all behind it go at once.

    Attributes:
        buffer_names: layout name by tensor id, for state that pieces hold (`kv.*`).
    """

    name: ClassVar[str] = "fuse-draft-chain"
    policy: ClassVar[Policy] = "required"
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
