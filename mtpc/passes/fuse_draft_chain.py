"""fuse-draft-chain: one flat graph out of verify, the draft layer and its K-1 chained steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import Inliner
from mtpc.passes.base import sweep


@dataclass(frozen=True)
class FuseDraftChain:
    """Inline every piece at the bucket's sizes.

    The draft layer was traced once with symbolic sizes; it is instantiated here for the R*Q
    verified rows and again for each single-row step, metadata updates in between included, so
    that no host work is left between drafts. Rewrites are the pieces inlined. What a piece
    computes and nobody asks for goes at once: of MTP layers that only keep their KV, attention
    and all behind it.

    Attributes:
        buffer_names: layout name by tensor id, for state that pieces hold (`kv.*`).
    """

    name: ClassVar[str] = "fuse-draft-chain"
    buffer_names: Mapping[int, str] = field(repr=False)

    def apply(self, graph: StepGraph) -> int:
        if graph.is_flat:
            return 0
        inliner = Inliner(graph, self.buffer_names)
        graph.module = inliner.run()
        sweep(graph)
        return inliner.num_inlined
