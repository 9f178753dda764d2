"""How a step chooses tokens from logits: greedily here, by parameters in `mtpc.step.sampling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.step.records import Accepted, Begun, Chosen, Metadata, unpack

if TYPE_CHECKING:
    from mtpc.step.drafting import DraftInputs
    from mtpc.step.step import Step

aten = torch.ops.aten


@dataclass(frozen=True)
class Verdict:
    """What the target says to the rows of a step; W = K + 1.

    Attributes:
        chosen: the target's token for W rows of each request, [R * W].
        ids: int64 [T], the rows' tokens, which acceptance compares with the choices.
        logits: what the tokens were chosen from, [T, V].
        places: in a ragged step the row of logits of each choice, int64 [R * W].
    """

    chosen: Chosen
    ids: Tensor
    logits: Tensor
    places: Tensor | None = None


class Choose(nn.Module):
    """The target's choice: the argmax over the vocabulary."""

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Logits [N, V] -> `Chosen` [N]."""
        best, tokens = logits.max(-1)
        return tuple(Chosen(tokens, torch.isfinite(best)))


class Pick(nn.Module):
    """The draft's choice: the argmax over the vocabulary."""

    def forward(self, logits: Tensor) -> Tensor:
        """Logits [R, V] -> token ids, int64 [R]."""
        return logits.argmax(-1)


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, the target's and the drafts': here, by the largest logit."""

    def verify(self, step: Step, logits: Tensor, begun: Begun, metadata: Metadata) -> Verdict:
        """The target's tokens for K + 1 rows of each request, from its logits [T, V].

        A ragged step packs the rows that get logits, so that kernels can leave out the rows after
        the last one. It then spreads the chosen tokens to K + 1 for each request.
        """
        if not step.is_ragged:
            return Verdict(unpack(Chosen, step.pieces.choose(logits)), begun.ids, logits)
        found = step.logits_rows(begun)
        packed = step.pieces.choose(aten.index_select.default(logits, 0, found.indices))
        chosen = unpack(Chosen, packed)
        spread = Chosen(*(aten.index_select.default(each, 0, found.places) for each in chosen))
        return Verdict(spread, begun.ids, logits)

    def record(self, step: Step, verdict: Verdict, begun: Begun) -> None:
        """Report what the step emits to requests that asked for more than tokens."""

    def draft_masks(self, step: Step, accepted: Accepted) -> Tensor | None:
        """The tokens that each draft may be, int32 [R, K, W]; None: all."""
        return None

    def pick(self, step: Step, index: int, logits: Tensor, inputs: DraftInputs) -> Tensor:
        """Draft `index` of each request: logits [R, V], or [R, V_d] -> token ids [R]."""
        token: Tensor = step.pieces.pick(logits)
        return step.pieces.draft_tokens(token) if step.drafting.has_vocabulary else token

    def pick_rows(
        self, step: Step, first: int, count: int, logits: Tensor, inputs: DraftInputs
    ) -> list[Tensor]:
        """Drafts `first` to `first` + `count` - 1: logits [R * count, V] -> token ids, [R] each."""
        shape = [step.key.bucket.num_reqs, count]
        tokens = aten.view.default(self.pick(step, first, logits, inputs), shape)
        return [aten.select.int(tokens, 1, place) for place in range(count)]
