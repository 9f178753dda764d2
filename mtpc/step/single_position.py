"""Drafts of a drafter without state, which attends to the target's own keys and values.

All K drafts are made at one position: that of the request's last accepted token, the last one whose
keys and values are final. The first draft takes the target's features of that row and the token
after it. Each later draft takes the draft before it and the drafter's own features. The drafter
needs no rows of a prompt. It writes no cache, so a rejected draft leaves nothing to undo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mtpc.step.drafting import Drafting, DraftInputs
from mtpc.step.records import Chained, unpack

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


@dataclass(frozen=True)
class SinglePosition(Drafting):
    """K passes at one position, whose metadata is published once."""

    head_reads: ClassVar[int] = 1

    @property
    def declared(self) -> dict[str, str]:
        return {
            **super().declared,
            "reads": "of the target: its features, keys and values; the last token",
            "keeps": "nothing",
            "drafts": "K passes at one position",
        }

    def drafts(self, step: Step, inputs: DraftInputs) -> list[Tensor]:
        """K drafts [R] of each request."""
        if step.key.spec_tokens == 0:
            return []
        begun, pieces = inputs.begun, step.pieces
        last = aten.sub.Tensor(inputs.accepted.lens, 1)
        row = unpack(Chained, pieces.chain_metadata(last, begun.active, begun.block_table))
        metadata = step.publish(row, inputs.metadata, step.key.bucket.num_reqs)
        token = aten.index_select.default(inputs.ids, 0, inputs.anchors)
        features = aten.index_select.default(inputs.features, 0, inputs.anchors)
        found: list[Tensor] = []
        for draft in range(step.key.spec_tokens):
            results = pieces.drafts[0](token, features, *metadata)
            features = results[0]
            token = step.choice.pick(step, draft, pieces.draft_heads[0](results[1]), inputs)
            found.append(token)
        return found
