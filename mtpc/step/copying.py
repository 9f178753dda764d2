"""Drafts that are copies: what followed the end of a request's text where it occurred earlier.

`state.text_ids` holds the text of every request: a prefill step writes its chunks, and a decode
step what it emits. The host writes the tokens whose pages are reused. A copy costs next to nothing,
so every step proposes as many drafts as a later step may verify, whatever its own K. It says how
many in `batch.num_drafts`: none where no end of the text occurs earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.ops.copy_drafts import LONGEST, SHORTEST
from mtpc.step.drafting import Drafting, DraftInputs

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


class CopyText(nn.Module):
    """Extends the texts by a step's certain tokens, and copies from them.

    Args:
        num_drafts: the largest K of the program.
    """

    def __init__(self, num_drafts: int):
        super().__init__()
        self.num_drafts = num_drafts

    def forward(self, text_ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `mtpc::copy_drafts` -> its drafts, [R] each, and their number [R]."""
        drafts, matched = torch.ops.mtpc.copy_drafts(text_ids, *given, self.num_drafts)
        num_drafts = torch.where(matched > 0, self.num_drafts, 0).int()
        return (num_drafts, *drafts.unbind(1))


@dataclass(frozen=True)
class Copying(Drafting):
    """Copies, without any module of a model.

    Attributes:
        most: the largest K of the program.
    """

    most: int = 0

    @property
    def declared(self) -> dict[str, str]:
        return {
            "reads": "the request's own text",
            "keeps": "the tokens of the text",
            "drafts": f"what followed the last {SHORTEST} to {LONGEST} tokens where they occurred "
            "earlier; none elsewhere",
            "head": "none",
        }

    def pieces(self, key: StepKey, page_size: int, vocab_size: int) -> dict[str, nn.Module]:
        return {"copy_text": CopyText(self.most)}

    def drafts(self, step: Step, inputs: DraftInputs) -> list[Tensor]:
        """The program's largest number of drafts [R], also where the step's own K is less."""
        begun, state = inputs.begun, step.state
        rows = (begun.ids, inputs.ids, inputs.metadata.query_start_loc)
        requests = (begun.context_lens, inputs.anchors, begun.active, begun.state_slots)
        found = step.pieces.copy_text(state.text_ids, *rows, *requests)
        aten.copy_.default(step.batch.num_drafts, found[0])
        return [found[1 + place] for place in range(self.most)]
